"""What the rules read: thirds, noise, the current stage; and what cannot be read is one line."""

from __future__ import annotations

import math
import shutil

import pytest
from tests.doctor.planted import Fault, early, plant, thirds, write

from gruppo import api
from gruppo.config.schema import Stage
from gruppo.doctor import rules
from gruppo.doctor.record import Series, read
from gruppo.types import GruppoError

VALUES = (1.0, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0, 10.0, 20.0, 30.0)


def series(*values: float) -> Series:
    return Series("x", dict(enumerate(values)))


def test_thirds_are_equal_at_the_ends_and_the_middle_has_what_is_left():
    thirds = [series(*VALUES).third(number) for number in range(3)]
    assert [third.mean for third in thirds] == [2.0, 5.0, 20.0]
    assert [[*third.points] for third in thirds] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("count", "counts"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (3, (1, 1, 1)), (5, (1, 3, 1))]
)
def test_thirds_of_few_values(count, counts):
    found = series(*map(float, range(count)))
    assert tuple(len(found.third(number)) for number in range(3)) == counts
    assert found.first == 0.0 and found.last == count - 1


def test_noise_is_the_root_of_half_the_mean_square_of_the_differences():
    found = series(1.0, 3.0, 2.0, 2.0)  # differences 2, -1, 0: 5 / (2 x 3)
    assert found.noise == pytest.approx(math.sqrt(5 / 6), rel=1e-12)
    assert series(1.0).noise == 0.0


def test_a_rise_is_one_beyond_two_standard_errors():
    # Differences 1, -1, 1, g - 1, 1: noise^2 = (4 + (g - 1)^2) / 10. The first and the last third
    # differ by g, with the noise as standard error: g > 2 noise where 6 g^2 + 8 g - 20 > 0, that is
    # g > 1.27698.
    def grown(g):
        return series(0.0, 1.0, 0.0, 1.0, g, g + 1)

    assert grown(1.2771).rises() and not grown(1.2769).rises()
    assert not grown(1.2771).rises(2, 0) and not Series("x").rises()


def test_nan_and_what_was_not_logged_are_not_in_a_series(tmp_path):
    run = plant(
        tmp_path, Fault({"grad/norm": early({2: 5.0, 3: float("nan"), 4: float("inf")}, None)}, ())
    )
    assert run["grad/norm"] == Series("grad/norm", {2: 5.0})
    assert len(run["no/such"]) == 0


def test_the_way_up_is_the_last_third_between_the_lowest_and_the_highest_reward(tmp_path):
    columns = {
        "reward/mean": thirds(0.0, 0.0, 1.0),
        "reward/min": -1.0,
        "reward/max": early({1: 4.0}, 3.0),
    }
    assert plant(tmp_path / "a", Fault(columns, ())).reward_level == pytest.approx(2 / 5)
    assert math.isnan(plant(tmp_path / "b", Fault(columns | {"reward/min": 4.0}, ())).reward_level)


def test_where_groups_grow_the_reward_is_that_of_the_first_samples(tmp_path):
    run = plant(tmp_path, Fault({"growth/first_reward_mean": 0.25}, ()))
    assert run.reward.name == "growth/first_reward_mean"


def test_remedies_are_for_the_stage_that_the_run_is_in(tmp_path):
    stages = (
        Stage(name="a", steps=9, lr=1e-4),
        Stage(name="b", lr="linear:2e-5,1e-5", kl_coef=0.1),
    )
    fault = Fault(
        {"stage/number": lambda step: 1 + (step > 9)},
        (),
        config={"stages": stages, "stage__kl_coef": 0.0},
    )
    run = plant(tmp_path, fault)
    assert str(next(iter(rules.scale_lr(run, 0.5)))) == "--stages.1.lr 1e-05"
    assert str(next(iter(rules.more_kl(run)))) == "--stages.1.kl-coef 0.2"
    assert next(iter(rules.scale_lr(run, 0.5, run.stage_at(9)))) == "--stages.0.lr 5e-05"


@pytest.mark.parametrize(
    ("value", "factor", "text"),
    [
        (0.03, 0.5, "0.015"),
        ("0.03", 2.0, "0.06"),
        ("cosine:1e-4, 1e-5, 40", 3.0, "0.0003"),
        ("adaptive:0.1,target=6,horizon=100", 2.0, "0.2"),
        (400.0, 1.0, "400"),
    ],
)
def test_a_value_is_scaled_and_of_a_schedule_the_first(value, factor, text):
    assert rules.scaled(value, factor) == text


# --- what cannot be read --------------------------------------------------------------------------


def damaged(name, text):
    def write_it(run):
        (run / name).write_text(text)

    return write_it


ROW = '{"step": 1, "reward/mean": 0.5}\n'
UNREADABLE = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config": (
        lambda run: (run / "config.json").unlink(),
        "has no config.json. Give the folder of a run",
    ),
    "a broken config": (damaged("config.json", "{"), "cannot be read as JSON"),
    "a foreign config": (damaged("config.json", '{"colour": 1}'), "unknown entry colour"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "has logged no step"),
    "empty metrics": (
        damaged("metrics.jsonl", ""),
        "has logged no step: .*metrics.jsonl has none. Wait until a step is complete",
    ),
    "an evaluation alone": (
        damaged("metrics.jsonl", '{"step": 0, "eval/reward_mean": 1}\n'),
        "has logged no step",
    ),
    "a damaged line": (
        damaged("metrics.jsonl", ROW + "{oops\n" + ROW),
        "metrics.jsonl, line 2 is not a JSON object",
    ),
    "a text": (
        damaged("metrics.jsonl", ROW + '{"step": 2, "a": "b"}\n'),
        "has a value that is not a number",
    ),
    "a list": (
        damaged("metrics.jsonl", ROW + '{"step": 2, "a": [1]}\n'),
        "has a value that is not a number",
    ),
    "no step": (
        damaged("metrics.jsonl", ROW + '{"step": null}\n'),
        "has a value that is not a number",
    ),
}


@pytest.mark.parametrize(("damage", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_folder_is_one_line_that_says_what_to_do(tmp_path, damage, message):
    run = write(tmp_path / "run", {})
    damage(run)
    with pytest.raises(GruppoError, match=message) as caught:
        read(run)
    assert (
        "\n" not in str(caught.value) and str(run) in str(caught.value)
    ) or "unknown entry" in message


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GruppoError, match="has no config"):
        read(tmp_path / "file")


def test_a_line_that_a_crash_has_torn_and_other_files_that_are_damaged_cost_nothing(tmp_path):
    run = write(
        tmp_path / "run",
        {},
        files=dict.fromkeys(("samples.jsonl", "manifest.json", "log.txt"), "{oops"),
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "rew')
    assert read(run).steps == 30


@pytest.mark.parametrize(
    "open_run", [lambda path: read(path), lambda path: api.resume(path, show=False)]
)
def test_a_mistyped_run_folder_names_the_nearest_run(tmp_path, open_run):
    (tmp_path / "first-run").mkdir()
    (tmp_path / "first-run" / "config.json").write_text("{}")
    with pytest.raises(
        GruppoError, match=r"frist-run does not exist\. Did you mean .*first-run\?$"
    ):
        open_run(tmp_path / "frist-run")
