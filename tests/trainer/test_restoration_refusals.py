"""What a network that restores images cannot do: refused in one line, here and on the command line;
or counted."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.modalities.restoration import fakes
from tests.trainer import restoration_runs
from tests.trainer.restoration_runs import built, here, said_in_one_line, trained
from tests.trainer.runs import metrics, stepped

from gruppo import api, inference
from gruppo.build import Parts
from gruppo.cli.app import main
from gruppo.config import serialization
from gruppo.config.schema import Stage
from gruppo.core.objective import Objective
from gruppo.trainer.update import backward
from gruppo.types import DataError, GruppoError, NumericalStop, Prompt

pytest.importorskip("PIL")

SUP = {"stage__rl_coef": 0.0, "stage__sup_coef": 1.0}
CONS = {"stage__cons_coef": 0.1}
CRITIC = {
    "baseline": "critic",
    "credit": "return_to_go",
    "scale": "none",
    "clip_unit": "nats",
    "kl": "exact",
}


def network(name: str) -> dict[str, Any]:
    return {"model": f"restore:{here(name)}"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no network": ({"model": "restore:"}, r"'restore:' names no network. Set --model restore:unet"),
    "an unknown network": (
        {"model": "restore:unett"},
        r"there is no network 'unett'.*Did you mean unet",
    ),
    "an unknown option of a network": (
        {"model": "restore:unet:depth=3"},
        r"there is no option 'depth'.*Did you mean width",
    ),
    "a network of another size": (
        network("Halves"),
        r"Halves returned \[1, 3, 32, 32\] for images \[1, 3, 64, 64\]",
    ),
    "a network that raises": (
        network("Raises"),
        r"Raises cannot restore images \[1, 3, 64, 64\]: no such picture",
    ),
    "a network without weights": (
        network("Weightless") | {"restoration__action": "pixels"},
        r"nothing is to be trained",
    ),
    "no such class": (network("TinyNetwrk"), r"restoration_runs.py has no 'TinyNetwrk'"),
    "no such file": ({"model": "restore:nowhere.py:Net"}, r"nowhere.py"),
    "no module": (network("NO_FUNCTION"), r"NO_FUNCTION is a int|NO_FUNCTION is an int"),
    "an unknown action": (
        {"restoration__action": "band_gain"},
        r"no action 'band_gain'.*Did you mean band_gains",
    ),
    "an unknown option of an action": (
        {"restoration__action": "pixels:size=3"},
        r"there is no option 'size'; write pixels:std",
    ),
    "a std of 0": (
        {"restoration__action": "pixels:std=0"},
        r"std=0 of an action; it needs to be above 0",
    ),
    "an unknown consistency": (
        CONS | {"restoration__consistency": "equivarance"},
        r"consistency='equivarance' is not reference or equivariance or "
        r"FILE.py:function",
    ),
    "a consistency that is no function": (
        CONS | {"restoration__consistency": here("NO_FUNCTION")},
        r"NO_FUNCTION is a int; a degradation is a function",
    ),
    "a consistency alone": (CONS | {"stage__rl_coef": 0.0}, r"learns nothing"),
    "a reference that rests": (
        CONS | {"reference__place": "cpu"},
        r"reference.place='cpu': a consistency to the reference reads its images in every update",
    ),
    "LoRA": ({"lora__rank": 4}, r"LoRA is not supported by RestorationPolicy"),
    "bfloat16": (
        {"compute": "bfloat16"},
        r"compute='bfloat16' holds the base below adapters.*--compute float32",
    ),
    "a critic": (
        {"objective": Objective(**CRITIC)},
        r"critic.kind needs a policy .*RestorationPolicy is not",
    ),
    "a temperature": ({"rollout__temperature": 0.5}, r"temperature.* images are sampled at 1"),
    "an entropy of a fixed std": (
        {"stage__entropy_coef": 0.1},
        r"is fixed by their std",
    ),
    "k3": (
        {"stage__kl_coef": 0.1, "objective__kl": "k3"},
        r"kl='k3' of a Gaussian policy.*--objective.kl exact",
    ),
    "a reference that nothing reads": (
        {"stages": (Stage(steps=2), Stage(new_reference=True))},
        r"stages\.1\.new_reference was set, but no stage's kl_coef is above 0",
    ),
    "a gate of no value": (
        {"stages": (Stage(steps=2, until="eval/psnr flat 0"), Stage())},
        r"until='eval/psnr flat 0' is not understood",
    ),
    "a gate of no metric": (
        {"stages": (Stage(steps=2, until="flat x"), Stage())},
        r"until='flat x' is not understood",
    ),
    "longest completions": ({"rollout__max_new_tokens": 64}, r"max_new_tokens=64 applies to text"),
    "top_k": ({"rollout__top_k": 5}, r"top_k=5, .* apply to tokens"),
    "epsilon of a mean": (
        {"objective": Objective(dims="mean", kl="exact"), "restoration__action": "pixels"},
        r"clip_high=0.2 of a mean over 192 dimensions",
    ),
    "data of texts": (
        {"data": "arithmetic", "reward": [here("bright")]},
        r"restores images, and the data 'arithmetic' have none: a prompt is a list",
    ),
}


@pytest.mark.parametrize(
    ("name", "value"), [("action_lr_factor", 0.0), ("action_lr_factor", math.inf)]
)
def test_a_value_out_of_range_is_refused_where_a_config_is_made(tmp_path, name, value):
    with pytest.raises(GruppoError, match=rf"restoration.{name}={value} is out of range"):
        restoration_runs.config(tmp_path, **{f"restoration__{name}": value})


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_written(tmp_path, capsys, what):
    """The same in Python and on the command line."""
    changes, why = REFUSED[what]
    config = restoration_runs.config(tmp_path, **changes)
    result = said_in_one_line(lambda: api.start(config), GruppoError)
    assert re.search(why, result), result
    on_the_command_line(tmp_path, capsys, config, why)
    assert not (tmp_path / "runs").exists()


def on_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], config: Any, why: str
) -> None:
    """It exits with 2, or with 3 where the data are what is wrong."""
    file = folder / "config.json"
    file.write_text(json.dumps(serialization.to_dict(config)))
    with pytest.raises(SystemExit) as left:
        main(["train", str(file)])
    err = capsys.readouterr().err
    assert left.value.code in (2, 3) and "Traceback" not in err
    assert (
        re.search(why, err) and sum(line.startswith("gruppo: ") for line in err.splitlines()) == 1
    ), err


# --- data -----------------------------------------------------------------------------------------


def test_images_that_are_smaller_than_the_crop_are_refused(tmp_path, capsys):
    config = restoration_runs.config(
        tmp_path, data=restoration_runs.degraded(tmp_path, "noise=25,crop=32")
    )
    why = r"8 of 8 images of .* are smaller than the crop of 32 pixels.*Set crop=24"
    assert re.search(why, said_in_one_line(lambda: api.start(config), DataError))
    on_the_command_line(tmp_path, capsys, config, why)


@pytest.mark.parametrize("what", ["another size", "without an other"])
def test_pairs_that_do_not_match_are_refused(tmp_path, capsys, what):
    clean, given = restoration_runs.write_images(tmp_path / "clean"), tmp_path / "given"
    restoration_runs.write_images(given, side=20 if what == "another size" else 24)
    if what == "without an other":
        (given / "3.png").unlink()
    config = restoration_runs.config(tmp_path, data=f"pairs:{given}:{clean}:crop=8")
    why = {
        "another size": r"the images 0 of .* are a pair of 20 x 20 and 24 x 24 pixels",
        "without an other": r"1 images are unpaired: 3 ",
    }[what]
    assert re.search(why, said_in_one_line(lambda: api.start(config), DataError))
    on_the_command_line(tmp_path, capsys, config, why)


def test_a_grey_network_for_colour_data_is_refused_and_so_are_its_weights(tmp_path, capsys):
    grey = restoration_runs.degraded(tmp_path, "noise=25,crop=8,channels=1")
    path = trained(tmp_path, model="restore:unet:width=4", data=grey, steps=1)
    colour = restoration_runs.config(tmp_path, model=str(path), name="colour")
    why = (
        r"none of the first 8 prompts of .* can be used: .* has \[3, 8, 8\] of torch.float32 as "
        r"its input; it needs floats \[1, H, W\]"
    )
    assert re.search(why, said_in_one_line(lambda: api.start(colour), GruppoError))
    on_the_command_line(tmp_path, capsys, colour, why)
    weights = {
        "model": "restore:unet:width=4",
        "restoration__weights": str(path),
        "name": "weights",
    }
    config = restoration_runs.config(tmp_path, **weights)
    why = r"are of another network than RestorationUNet: 3 of another shape: conv_in.weight"
    assert re.search(why, result := said_in_one_line(lambda: api.start(config), GruppoError)), (
        result
    )
    assert str(path) in result
    on_the_command_line(tmp_path, capsys, config, why)


def test_weights_of_another_network_are_refused(tmp_path, capsys):
    path = trained(tmp_path, model="restore:unet:width=4", steps=1)
    other = {
        "model": "restore:unet:width=6",
        "restoration__weights": str(path / "final"),
        "name": "other",
    }
    config = restoration_runs.config(tmp_path, **other)
    why = (
        r"the weights in .* are of another network than RestorationUNet: .* of another shape: "
        r".* Give the network"
    )
    assert re.search(why, said_in_one_line(lambda: api.start(config), GruppoError))
    on_the_command_line(tmp_path, capsys, config, why)
    nothing = restoration_runs.config(
        tmp_path, **(other | {"restoration__weights": str(tmp_path / "none")})
    )
    assert "none" in said_in_one_line(lambda: api.start(nothing), GruppoError)


def test_settings_of_a_new_policy_are_refused_for_a_saved_one(tmp_path, capsys):
    path = trained(tmp_path, steps=1)
    config = restoration_runs.config(
        tmp_path, model=str(path), name="again", restoration__action="pixels"
    )
    why = (
        r"restoration.action is of a new policy, and .* has its own. Leave --restoration.action out"
    )
    assert re.search(why, said_in_one_line(lambda: api.start(config), GruppoError))
    on_the_command_line(tmp_path, capsys, config, why)


class Given:
    """A source of prompts from Python."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts, self.at = prompts, 0

    def take(self, n: int) -> list[Prompt]:
        found = [self.prompts[(self.at + k) % len(self.prompts)] for k in range(n)]
        self.at += n
        return found

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def given(*changes: Any, count: int = 8) -> Parts:
    """``count`` prompts whose inputs are changed, each its own."""
    prompts = [
        Prompt(f"p{n}", fakes.picture(n), fakes.picture(n + 50), draw=n) for n in range(count)
    ]
    for change in changes:
        prompts = [change(prompt) for prompt in prompts]
    return Parts(data=Given(prompts))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (
            fakes.picture(0) * 255,
            r"has values from .* to 2\d\d.* as its input; it needs floats",
        ),
        (fakes.picture(0) - 0.5, r"has values from -0"),
        (fakes.picture(0) * float("nan"), r"has values from nan to nan"),
        ((fakes.picture(0) * 255).byte(), r"torch.uint8 as its input; it needs floats \[3, H, W\]"),
        (fakes.picture(0)[0], r"it needs floats \[3, H, W\]|have none"),
    ],
    ids=["bytes as floats", "below 0", "NaN", "bytes", "two dimensions"],
)
def test_prompts_outside_the_range_are_refused_with_what_to_do(tmp_path, inputs, why):
    parts = given(lambda prompt: Prompt(prompt.id, inputs, prompt.target, draw=prompt.draw))
    config = restoration_runs.config(tmp_path, data="<in memory>")
    assert re.search(
        why, result := said_in_one_line(lambda: api.start(config, parts), GruppoError)
    ), result


def test_one_prompt_outside_the_range_is_passed_over_and_named(tmp_path, caplog):
    parts = given(
        lambda p: Prompt(p.id, p.inputs * (3 if p.id == "p3" else 1), p.target, draw=p.draw)
    )
    path = api.start(restoration_runs.config(tmp_path, data="<in memory>"), parts).folder
    assert "left out: prompt 'p3' has values from" in caplog.text
    assert len([row for row in metrics(path) if "optim/lr" in row]) == 4


def test_demonstrations_without_clean_pictures_are_refused(tmp_path):
    parts = given(lambda prompt: Prompt(prompt.id, prompt.inputs, None, draw=prompt.draw))
    parts = Parts(data=parts.data, rewards=[restoration_runs.bright])
    pairs = f"degrade:{restoration_runs.write_images(tmp_path / 'images')}:noise=25,crop=8"
    config = restoration_runs.config(tmp_path, data="<in memory>", supervised__data=pairs, **SUP)
    api.start(config, parts)  # where they have a source of their own, all is well
    with pytest.raises(
        GruppoError, match=r"demonstrations cannot be drawn from as well. Set supervised.data"
    ):
        api.start(restoration_runs.config(tmp_path, data="<in memory>", name="own", **SUP), parts)
    demos = tiny.write_rows(tmp_path / "demos.jsonl")
    with pytest.raises(
        DataError,
        match=r"none of the first 8 demonstrations can be learned from: .* it needs floats",
    ):
        api.start(restoration_runs.config(tmp_path, supervised__data=demos, name="texts", **SUP))


# --- other kinds of model -------------------------------------------------------------------------


# --- rewards --------------------------------------------------------------------------------------


def test_a_reward_that_is_nan_costs_its_rows_and_the_run_goes_on(tmp_path):
    run = built(tmp_path, reward=[here("sometimes_nan")])
    batch, logged = stepped(run)
    assert batch.rewards.isnan().tolist() == [True, False, False, False] * 2
    assert torch.equal(batch.loss_mask[:, 0], ~batch.rewards.isnan())
    assert logged["update/updates_count"] == 1 and logged["update/skipped_count"] == 0
    path = trained(tmp_path, reward=[here("sometimes_nan")])
    rows = [row for row in metrics(path) if "optim/lr" in row]
    assert len(rows) == 4 and all(
        row["reward/not_finite_count"] == row["reward/unscored_count"] == 2 for row in rows
    )


def test_a_network_that_makes_nan_of_some_pictures_costs_those_rows(tmp_path):
    """They end in error, are counted, and the gradient is finite."""
    data = restoration_runs.degraded(tmp_path, "noise=25,crop=8")
    run = built(
        tmp_path,
        data=data,
        rollout__prompts=8,
        stage__kl_coef=0.1,
        **(CONS | network("BreaksOnSome")),
    )
    step_params = run.stage_schedule.step_params(0)
    batch = collect(run, step_params).batch
    assert batch.rollouts is not None
    broken = torch.tensor([finish == "error" for finish in batch.rollouts.finish])
    assert 0 < int(broken.sum()) < len(broken) and not batch.rollouts.mask[broken].any()
    first = batch.rollouts.shared["degraded"][batch.rollouts.group_ids][:, 0, 0, 0]
    assert torch.equal(broken, first > 0.55)
    backward(run, batch, step_params)
    assert (
        restoration_runs.gradient(run).isfinite().all()
        and restoration_runs.gradient(run).norm() > 0
    )
    path = trained(tmp_path, data=data, rollout__prompts=8, steps=2, **network("BreaksOnSome"))
    rows = [row for row in metrics(path) if "optim/lr" in row]
    assert (
        rows[0]["finish/error_count"] == int(broken.sum()) and rows[1]["update/updates_count"] == 1
    )


def test_a_network_that_makes_nan_of_everything_ends_in_one_line(tmp_path):
    config = restoration_runs.config(tmp_path, **network("BreaksAlways"))
    result = said_in_one_line(lambda: api.start(config), NumericalStop)
    assert re.search(r"step 0: every rollout ended in .* not finite", result)


def test_what_sample_cannot_restore_is_one_line(tmp_path, capsys):
    path = trained(tmp_path, steps=1)
    whole = restoration_runs.write_images(tmp_path / "whole", 1) / "0.png"
    (tmp_path / "text.png").write_text("no image")
    for file, why in (
        (tmp_path / "none.png", r"none.png"),
        (tmp_path / "text.png", r"text.png"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["sample", str(path), str(file), "--folder", str(tmp_path / "out")])
        err = capsys.readouterr().err
        assert left.value.code in (2, 3) and err.startswith("gruppo: ") and err.count("\n") == 1
        assert re.search(why, err), err
    assert not (tmp_path / "out").exists()
    with pytest.raises(GruppoError, match="--n 0 samples nothing"):
        inference.sample(path, [str(whole)], tmp_path / "out", n=0)


# --- asking a run ---------------------------------------------------------------------------------
