"""The console shows what was logged, in a terminal and in a log file, whatever the texts hold."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console

from gruppo.loading import visible
from gruppo.tracking.console import ConsoleTracker, best_and_worst
from gruppo.tracking.formatting import as_text, duration, number, shorten
from gruppo.tracking.samples import sheet_name

STEP = {
    "reward/mean": 0.4125,
    "reward/std_within_group": 0.3,
    "kl/ref_nats": 0.002,
    "entropy/mean_nats": 0.8,
    "len/mean_actions": 3.1,
    "rate/tokens_per_s": 412.0,
    "time/rollout_s": 1.2,
    "time/reward_s": 0.1,
    "time/update_s": 0.6,
    "clip/high_frac": 0.015,
    "somebody/else": 7.0,
}
NASTY = [
    {
        "prompt": "[red]1 + 1[/red] [/oops]",
        "completion": "[bold\n\x1b[31m2\x07",
        "reward": 1.0,
        "target": 2,
    },
    {
        "prompt": [{"role": "user", "content": "2 + 2"}],
        "completion": "中文" * 90,
        "reward": math.nan,
        "target": None,
    },
    {"prompt": "\udc80", "completion": ""},
]


def tracker(total, *, is_terminal, width=80, now=None, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(
        file=file, width=width, height=50, force_terminal=is_terminal, color_system=None
    )
    now = now or [0.0]
    return ConsoleTracker(total, console=console, clock=lambda: now[0], **options)


def output(console_tracker):
    console_tracker.close()
    return console_tracker.console.file.buffer.getvalue().decode("utf-8")


def final_screen(console_tracker):
    console_tracker.close()
    console = Console(file=io.StringIO(), width=console_tracker.console.width, color_system=None)
    console.print(console_tracker.screen())
    return console.file.getvalue()


@pytest.mark.silent_bug(41)
def test_a_plain_line_holds_the_values_and_the_time_left():
    now = [0.0]
    plain = tracker(150, is_terminal=False, now=now)
    for step in (11, 12):
        now[0] += 2.0
        plain.log(step, STEP)
    rest = "reward 0.412  spread 0.3  kl 0.002  entropy 0.8  len 3.1  412 tokens/s"
    assert (
        output(plain) == f"step 11/150  {rest}\nstep 12/150  {rest}  4:36 left\n"
    )  # 138 steps of 2 s


def test_rows_without_a_reward_are_counted_on_the_line_and_on_the_screen():
    plain, live = (tracker(9, is_terminal=is_terminal) for is_terminal in (False, True))
    for each in (plain, live):
        each.log(1, STEP | {"reward/unscored_count": 2.0})
    assert "2 without a reward" in output(plain)
    assert "2 without a reward" in final_screen(live)


def test_a_resumed_run_begins_at_its_step_and_says_that_it_is_stopping():
    live = tracker(150, is_terminal=True, step=70)
    assert "step 70/150" in final_screen(live)
    assert live.announce("finishing this step") and "finishing this step" in final_screen(live)
    plain = tracker(150, is_terminal=False)
    assert not plain.announce("finishing this step")


def test_failed_rows_are_for_the_file_alone():
    plain = tracker(9, is_terminal=False)
    plain.log_samples(1, [NASTY[0] | {"failures": [{"kind": "exception"}]}])
    assert output(plain) == ""


def test_a_held_out_evaluation_is_a_line_of_its_own():
    plain = tracker(9, is_terminal=False)
    plain.log(3, {"eval/reward_mean": 0.625, "eval/exact": 0.5})
    assert output(plain) == "step 3/9  held-out reward 0.625, exact 0.5\n"


def test_plain_lines_are_not_wrapped_and_markup_is_text():
    plain = tracker(9, is_terminal=False, width=20)
    plain.log_samples(1, NASTY[:1])
    plain.note("[red]reward[/red] raised " + "x" * 80, is_warning=True)
    assert output(plain).splitlines() == [
        r'  reward 1  "[red]1 + 1[/red] [/oops]" -> "[bold\n\x1b[31m2\x07"  target 2',
        "warning: [red]reward[/red] raised " + "x" * 80,
    ]


@pytest.fixture
def sheets(tmp_path, monkeypatch):
    """The sheets of steps 1, 2 and 9 of the run runs/a."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 9):
        for name in (sheet_name(step), sheet_name(step, is_held_out=True)):
            (tmp_path / "runs/a" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs/a" / name).touch()


IMAGES = [
    {"prompt": n, "completion": torch.rand(1, 28, 28), "reward": n / 4, "target": None}
    for n in range(5)
]


def test_plain_lines_of_images_have_prompt_reward_and_the_file_of_the_sheet(sheets):
    plain = tracker(9, is_terminal=False, run_dir="runs/a")
    plain.log_samples(1, IMAGES)
    plain.log_samples(1, [row | {"held_out": True} for row in IMAGES])
    assert output(plain).splitlines() == [
        '  reward 1  "4"',
        '  reward 0  "0"',
        "  images: runs/a/images/step_000001.png",
        "  held-out images: runs/a/images/eval_000001.png",
    ]


def test_a_terminal_without_unicode_gets_escapes():
    plain = tracker(9, is_terminal=True, encoding="ascii")
    plain.log_samples(1, [{"prompt": "é", "completion": "中", "reward": 0.0}])
    assert '"\\xe9" -> "\\u4e2d"' in output(plain)


def test_samples_are_shown_again_only_after_some_steps():
    plain = tracker(20, is_terminal=False, samples_every=5)
    for step in range(1, 13):
        plain.log_samples(step, [{"prompt": "p", "completion": f"at {step}.", "reward": 1.0}])
    assert [f"at {step}." in output(plain) for step in (1, 2, 5, 6, 10, 11, 12)] == [
        1,
        0,
        0,
        1,
        0,
        1,
        0,
    ]


@pytest.mark.parametrize("width", [30, 50, 80, 120, 200])
def test_the_live_screen_survives_nasty_texts_and_numbers(width):
    live = tracker(3, is_terminal=True, width=width)
    live.log_samples(1, NASTY)
    live.log(1, STEP)
    live.log(2, dict.fromkeys(STEP, math.nan))
    live.log(3, dict.fromkeys(STEP, math.inf))
    live.note("[/nonsense]")
    screen = final_screen(live)
    assert "\x1b" not in screen and "\x07" not in screen
    assert all(len(line) <= width for line in screen.splitlines() if line.isascii())
    assert "[/nonsense]" in output(live)


def test_the_live_screen_shows_known_metrics_and_no_others():
    live = tracker(150, is_terminal=True)
    for step, reward in enumerate([0.0, 0.4, 1.0], start=1):
        live.log(step, STEP | {"reward/mean": reward})
    screen = final_screen(live)
    assert "step 3/150" in screen and "somebody" not in screen and "gradient norm" not in screen
    (line,) = [line for line in screen.splitlines() if line.startswith("reward ")]
    assert line.split() == ["reward", "1"]
    assert "clipped above" in screen and "0.015" in screen


def test_time_left_counts_down_while_a_step_runs():
    now = [0.0]
    live = tracker(10, is_terminal=True, now=now)
    for step in (1, 2, 3):
        now[0] += 60.0
        live.log(step, STEP)
    now[0] += 30.0
    assert "3:30 elapsed, about 6:30 left" in final_screen(
        live
    )  # 7 steps of 60 s, half of one gone


@pytest.mark.silent_bug(24)
def test_best_and_worst_keep_the_row_of_each_reward():
    rewards = {"a": 0.5, "b": math.nan, "c": 1, "d": 0, "e": 0.7, "f": 0.2}
    rows = [{"completion": name, "reward": reward} for name, reward in rewards.items()]
    assert [row["completion"] for row in best_and_worst(rows)] == ["c", "e", "d", "b"]
    assert best_and_worst(rows[:2]) == rows[:2]


def test_numbers_take_few_characters():
    values = [
        0.23649,
        0.00452,
        4.82e-5,
        -0.00012,
        412.3,
        18345.0,
        1.0,
        0.0,
        math.nan,
        None,
        math.inf,
        1e9,
    ]
    texts = [
        "0.236",
        "0.0045",
        "4.8e-05",
        "-1.2e-04",
        "412",
        "18 300",
        "1",
        "0",
        "-",
        "-",
        "inf",
        "1e+09",
    ]
    assert [number(value) for value in values] == texts


def test_spans_of_time():
    assert [duration(seconds) for seconds in (0, 59.6, 102, 7509)] == [
        "0:00",
        "1:00",
        "1:42",
        "2:05:09",
    ]


def test_texts_stay_on_one_line_and_show_what_cannot_be_seen():
    assert visible("a\tb\r\n\x1b[0m\u202e\u200bé") == r"a\tb\r\n\x1b[0m\u202e\u200bé"
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcdef…ijk"
    assert (
        as_text([{"role": "system", "content": "s"}, {"role": "user", "content": "hi\n"}])
        == r"hi\n"
    )
    talk = [("assistant", "8"), ("user", "Higher."), ("assistant", "12\n")]
    assert as_text([{"role": role, "content": text} for role, text in talk]) == r"8 [Higher.] 12\n"
    called = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": called},
        {"role": "tool", "content": "2"},
    ]
    assert as_text(messages) == 'add({"a": 1}) [2]'


@pytest.mark.parametrize(
    ("unit", "line"), [("image", "reward 0.5  80 images/s"), ("step", "len 10  800 steps/s")]
)
def test_the_rate_is_in_the_units_of_the_policy_and_images_have_no_length(unit, line):
    metrics = {
        "reward/mean": 0.5,
        "entropy/mean_nats": 300.0,
        "len/mean_actions": 10.0,
        "rate/tokens_per_s": 800.0,
    }
    plain = tracker(9, is_terminal=False, unit=unit)
    plain.log(1, metrics)
    assert output(plain).endswith(f"  {line}\n")
    live = tracker(9, is_terminal=True, unit=unit)
    live.log(1, metrics)
    assert f"{unit}s/s" in final_screen(live) and ("length" in final_screen(live)) == (
        unit != "image"
    )
