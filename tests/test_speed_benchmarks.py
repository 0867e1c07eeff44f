"""What the benchmarks of speed count and compare is right; how fast anything is, no test says."""

from __future__ import annotations

import json
import mmap
import queue
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import (
    flops,
    generate,
    memory,
    peaks,
    roofline,
    scaling,
    scaling_plot,
    step,
    tables,
    turns,
)
from benchmarks.ends import ScriptedEnds, force_ends
from benchmarks.flops import Shape
from benchmarks.workloads import WORKLOADS, ending_rate, prompts, row_lengths
from tests import tiny
from torch.utils.flop_counter import FlopCounterMode

from gruppo.modalities.text.load import from_pretrained
from gruppo.types import Prompt, Request, Sampling

SHAPE = Shape(hidden=2, intermediate=3, layers=1, heads=1, kv_heads=1, head_dim=2, vocabulary=5)
GROUP = (3, [2, 3])
"""A prompt of 3 tokens with completions of 2 and 3."""


# --- the same work --------------------------------------------------------------------------------


def test_the_rate_of_ends_is_by_hand() -> None:
    assert ending_rate(1.75, 2) == pytest.approx(0.25)  # E min(G, 2) = 2 - p
    assert ending_rate(10.0, 10**6) == pytest.approx(0.1)
    with pytest.raises(
        ValueError, match="a mean of 70 new tokens is not between 1 and the most, 64"
    ):
        ending_rate(70, 64)


def test_ragged_lengths_have_their_mean_and_most_at_every_step() -> None:
    most, mean = WORKLOADS["ragged"]["new_tokens"], WORKLOADS["ragged"]["mean_tokens"]
    steps = [row_lengths(32, step, most=most, mean=mean) for step in range(20)]
    assert all(
        abs(sum(lengths) / 32 - 65) < 2 and 240 < max(lengths) <= 256 and min(lengths) >= 1
        for lengths in steps
    )
    assert sum(map(sum, steps)) / (20 * 32) == pytest.approx(65, abs=0.3)
    assert steps[0] != steps[1] and steps[1] == row_lengths(32, 1, most=most, mean=mean)
    assert row_lengths(3, 0, most=64) == [64, 64, 64]


def test_an_end_token_can_be_drawn_at_a_rows_last_position_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    force_ends(logits, torch.tensor([2, 3]), written=1, ends=[2, 0])
    off = -torch.inf
    assert logits.tolist() == [[off, off, 0.0, off], [off, 2.0, off, 4.0]]


def test_gruppos_rows_end_where_they_are_told_to_and_only_then() -> None:
    policy = from_pretrained(tiny.model(), compute="float32")
    requests = [Request(Prompt(f"{i}", f"{i}", draw=i), 4) for i in range(2)]
    free = policy.sample(requests, Sampling(max_actions=12), seed=0)
    ends = ScriptedEnds(policy)
    ends.lengths = [1, 12, 3, 3, 7, 2, 12, 5]
    scripted = policy.sample(requests, Sampling(max_actions=12), seed=0)
    assert scripted.lengths.tolist() == [1, 12, 3, 3, 7, 2, 12, 5] and set(scripted.finish) == {
        "stop"
    }
    again = policy.sample(requests, Sampling(max_actions=12), seed=0)
    assert torch.equal(again.actions, free.actions) and ends.lengths == []


def test_prompts_are_all_different_and_as_long_as_each_other() -> None:
    texts = [prompt[0]["content"] for prompt in prompts(900, 57)]
    assert len(set(texts)) == 900 and len(set(map(len, texts))) == 1
    assert prompts(2, 57, first=4) == prompts(6, 57)[4:]


def test_different_work_is_refused() -> None:
    one = {"prompt_tokens": [5, 5], "lengths": [2, 4]}
    step.check_same_work({"gruppo": [one], "trl": [one]})
    with pytest.raises(
        SystemExit, match=r"trl did other work than gruppo.*completions of 4 / 4\.0 / 4 tokens"
    ):
        step.check_same_work({"gruppo": [one], "trl": [one | {"lengths": [4, 4]}]})


# --- the sums -------------------------------------------------------------------------------------


def test_ratios_are_step_by_step_and_memory_is_above_the_state() -> None:
    def turn(seconds: float, rollout_s: float, peak: float) -> dict[str, Any]:
        phases = {"seconds": seconds, "rollout_s": rollout_s, "update_s": seconds - rollout_s}
        return phases | {"peak_bytes": peak, "lengths": [2, 4], "prompt_tokens": [5, 5]}

    done = {
        "gruppo": [turn(2, 1, 1.0e9), turn(4, 2, 2.6e9), turn(3, 1, 2.0e9)],
        "trl": [turn(6, 2, 4.0e9), turn(20, 8, 6.6e9), turn(12, 4, 5.0e9)],
    }
    found = step.summarise({"parameters": 100_000_000, "steps": done})
    assert (
        found["trl_over_gruppo"]["median"] == 4 and found["trl_over_gruppo"]["max"] == 5
    )  # of 3, 5 and 4
    assert found["trl_over_gruppo"]["rollout_s"] == 4 and found["trl_over_gruppo"]["update_s"] == 4
    assert found["gruppo"]["seconds_median"] == 3 and found["gruppo"]["tokens_per_s"] == 2
    assert found["gruppo"]["above_state_gb"] == pytest.approx(
        1.0
    )  # 2.6 - 16 bytes of each parameter
    assert found["memory_gruppo_over_trl"]["above_state_gb"] == pytest.approx(0.2)
    assert "TRL / gruppo in time, step by step: 4.00 (3.00 to 5.00)" in step.table({"short": found})


def test_rates_of_writing_are_compared_turn_by_turn() -> None:
    done = {
        "gruppo": [{"lengths": [4, 4], "seconds": seconds} for seconds in (1.0, 2.0, 4.0)],
        "vllm": [{"lengths": [4, 4], "seconds": seconds} for seconds in (2.0, 3.0, 4.0)],
    }
    found = generate.summarise(done)
    assert found["gruppo"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    assert found["vllm"]["gruppo_over_it"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert "1.50 (1.00 to 2.00)" in generate.table({2: found})


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="the system does not tell a process's memory"
)
def test_the_peak_is_seen_after_the_memory_is_given_back() -> None:
    before = memory.begin()
    size = 100 * 2**20
    with mmap.mmap(
        -1, size
    ) as block:  # an allocator may reuse memory that the process holds already
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
    assert memory.held() - before < 0.5 * size < 0.9 * size < memory.peak() - before < 2 * size
    assert memory.above_state(2.15e9, 100_000_000) == pytest.approx(0.55e9)


# --- arithmetic -----------------------------------------------------------------------------------


def test_operations_are_by_hand() -> None:
    assert SHAPE.trunk_weights == 4 * 4 + 3 * 6 and SHAPE.head_weights == 10
    # Tokens: the prompt's 3, and of each completion all but its last. Pairs: 1 + 2 + 3 of the
    # prompt, 4 of the first completion's one token, 4 + 5 of the second's two.
    assert flops.forward(SHAPE, [GROUP]) == flops.Work(
        trunk=2 * 34 * 6, attention=4 * 2 * 19, head=2 * 10 * 5
    )
    assert flops.update(SHAPE, [GROUP]).total == 3 * (408 + 152 + 100)
    assert flops.prefill(SHAPE, [3]) == flops.Work(
        trunk=2 * 34 * 3, attention=4 * 2 * 6, head=2 * 10
    )
    assert flops.decode(SHAPE, [GROUP]) == flops.Work(
        trunk=2 * 34 * 3, attention=4 * 2 * 13, head=2 * 10 * 3
    )


def test_decoding_reads_weights_at_each_step_and_a_prompt_once_a_group() -> None:
    # Three steps: 44 weights each; the prompt's 3 tokens each; own tokens 1, and 1 + 2 + 3; 4
    # numbers a token; 2 bytes.
    assert SHAPE.kv_numbers == 4
    assert flops.decode_bytes(SHAPE, [(3, [2, 4])], bytes_each=2) == 2 * (
        3 * 44 + 4 * (3 * 3 + 1 + 1 + 2 + 3)
    )


def test_products_are_what_torch_counts_in_the_models_own_forward() -> None:
    module = from_pretrained(tiny.model(), compute="float32").module
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module(torch.zeros(1, 20, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    work = flops.forward(Shape.of(module.config), [(1, [20])])  # 20 tokens read, 20 scored
    assert work.trunk + work.head == counted
    products = flops.products(Shape.of(module.config), [(1, [20])])
    assert sum(products.values()) == 3 * counted


def test_a_rate_of_several_parts_is_all_work_over_all_time() -> None:
    assert (
        flops.ideal_rate({"a": 6.0, "b": 2.0}, {"a": 3.0, "b": 1.0, "c": 9.0}) == 2.0
    )  # 8 in 2 + 2 seconds


def test_a_phases_fraction_is_its_rate_over_the_measured_one() -> None:
    rates = dict.fromkeys(flops.products(SHAPE, [GROUP]), 1000.0)
    forward = dict.fromkeys([*SHAPE.linears, "head"], 500.0)
    best = {
        "update": rates,
        "prefill": forward,
        "decode": forward,
        "memory": {"read": 800.0, "in place": 2800.0},
    }
    seconds = {"rollout_s": 3.0, "prefill_s": 1.0, "update_s": 4.0, "optimiser_s": 1.0}
    phases = roofline.summarise(SHAPE, seconds, [GROUP], best, bytes_each=2, parameters=50)
    assert phases["update"]["fraction"] == pytest.approx(1980 / 4 / 1000)
    assert phases["  forward, backward"]["fraction"] == pytest.approx(1980 / 3 / 1000)
    assert phases["  optimiser"]["fraction"] == pytest.approx(28 * 50 / 2800)
    assert phases["prefill"]["fraction"] == pytest.approx((204 + 48 + 20) / 500)
    assert phases["decode"]["fraction"] == pytest.approx((204 + 104 + 60) / 2 / 500)
    assert phases["decode"]["memory"]["fraction"] == pytest.approx(256 / 2 / 800)


def test_rows_of_a_step_are_put_in_their_groups() -> None:
    reported = {"prompt_tokens": [7, 7, 9, 9], "lengths": [1, 2, 3, 4]}
    assert roofline.groups_of(reported, 2) == [(7, [1, 2]), (9, [3, 4])]


def test_of_several_measurements_each_rate_is_at_its_best() -> None:
    assert roofline.fastest([{"a": {"x": 1.0, "y": 5.0}}, {"a": {"x": 2.0, "y": 3.0}}]) == {
        "a": {"x": 2.0, "y": 5.0}
    }


def test_every_product_of_an_update_has_a_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "SECONDS", 0.0)
    monkeypatch.setattr(peaks, "HEAD_CHUNKS", (2, 8))
    rates = peaks.update_rates(SHAPE, 6, 5, torch.float32)
    assert rates.keys() == flops.products(SHAPE, [GROUP]).keys() and all(
        rate > 0 for rate in rates.values()
    )


# --- lines ----------------------------------------------------------------------------------------


def test_a_line_is_found_and_the_distance_from_it_is_in_shares_of_it() -> None:
    assert scaling.fit([4, 8, 32], [3.0, 5.0, 17.0]) == pytest.approx((1.0, 0.5, 0.0))
    assert scaling.fit([0, 1, 2], [1.0, 1.0, 4.0]) == pytest.approx(
        (0.5, 1.5, 1.0)
    )  # 0.5, 2 and 3.5 on the line


def test_series_cover_a_factor_of_eight_and_tell_what_a_completion_costs() -> None:
    points = {
        one.name: [
            {
                "rollout_s": 1 + 0.1 * spec["group_size"],
                "update_s": 2 + (0.3 if spec["words"] > 100 else 0.2) * spec["group_size"],
                "peak_gb": 3.0,
                "prompt_tokens": spec["words"] + 46,
            }
            for spec in one.specs()
        ]
        for one in scaling.SERIES
    }
    assert all(
        7.9 < one.values[-1] / one.values[0] <= 8 for one in scaling.SERIES if one.knob != "words"
    )
    found = scaling.summarise(scaling.SERIES, points, with_memory=True)
    assert found["prompt length"]["x"] == [54, 103, 200, 393] and found["model size"]["x"] == [
        4,
        8,
        16,
        32,
    ]
    assert scaling.marginal(found) == pytest.approx(
        {"short": 0.3, "long": 0.4, "long_over_short": 4 / 3}
    )
    reported = scaling.table(found, scaling.marginal(found))
    assert "300 ms with short prompts, 400 ms with long ones, 1.33 times as much" in reported


def test_names_of_lines_that_end_together_are_drawn_apart() -> None:
    assert scaling_plot.apart([1.0, 1.1, 3.0], 0.5) == [1.0, 1.5, 3.0]


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's context holds no more."""
    size = {"words": 1, "new_tokens": 6}
    for name, value in (("SECONDS", 0.0), ("SQUARE", 32), ("BUFFER_BYTES", 2**12)):
        monkeypatch.setattr(peaks, name, value)
    monkeypatch.setattr(step, "WORKLOADS", {"ragged": size | {"mean_tokens": 3.0}})
    monkeypatch.setattr(roofline, "WORKLOADS", {"short": size | {"mean_tokens": None}})
    series = scaling.Series(
        "prompt length", "tokens", "words", (1, 2), {"new_tokens": 4, "group_size": 2, "layers": 1}
    )
    monkeypatch.setattr(scaling, "SERIES", (series,))


def arguments(folder: Path, name: str) -> list[str]:
    paths = ["--json", str(folder / f"{name}.json"), "--plot", str(folder / f"{name}.png")]
    return ["--model", tiny.model(), "--compute", "float32", *paths]


def written(folder: Path, name: str) -> dict[str, Any]:
    assert (folder / f"{name}.png").stat().st_size > 5_000
    reported = json.loads((folder / f"{name}.json").read_text())
    assert reported["benchmark"] == name and reported["machine"]["cpu"]
    assert tables.replaced(f"<!-- {name} --><!-- end -->", name, reported).count("\n|") > 2
    return reported


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_roofline_and_scaling_print_write_and_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roofline.main(["--workloads", "short", "--steps", "1", *arguments(tmp_path, "roofline")])
    phases = written(tmp_path, "roofline")["results"]["short"]["phases"]
    assert all(phase["fraction"] > 0 for phase in phases.values())
    scaling.main(["--short", "--series", "prompt length", *arguments(tmp_path, "scaling")])
    reported = written(tmp_path, "scaling")["measured"]
    one, two = reported["points"]["prompt length"]
    assert one["prompt_tokens"] < two["prompt_tokens"]
    printed = capsys.readouterr().out
    assert "forward, backward" in printed and "off the line" in printed


class Here(threading.Thread):
    """A side as a thread of this process, in which everything is imported; ``turns.Side`` is tested
    below."""

    def __init__(self, name: str, arguments: Sequence[str], **_: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.go: queue.Queue[bool] = queue.Queue()
        self.messages: queue.Queue[str | BaseException] = queue.Queue()
        self.module, *sys.argv[1:] = arguments
        self.start()
        self.ready = self.read()

    def run(self) -> None:
        try:
            runpy.run_module(self.module, run_name="__main__")
        except BaseException as end:
            self.messages.put(end)

    def say(self, **numbers: Any) -> None:
        self.messages.put(json.dumps(numbers))

    def wait_for_turn(self) -> None:
        if not self.go.get():
            sys.exit(0)

    def read(self) -> dict[str, Any]:
        message = self.messages.get()
        if isinstance(message, BaseException):
            raise message
        return json.loads(message)

    def turn(self) -> dict[str, Any]:
        self.go.put(True)
        return self.read()

    def close(self) -> None:
        self.go.put(False)
        self.join()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_both_sides_of_a_step_and_of_writing_do_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(sys, "argv", ["side"])
    monkeypatch.setattr(turns, "say", lambda **numbers: threading.current_thread().say(**numbers))
    monkeypatch.setattr(turns, "wait_for_turn", lambda: threading.current_thread().wait_for_turn())
    for benchmark in (step, generate):
        monkeypatch.setattr(benchmark, "Side", Here)
    with torch.random.fork_rng():  # TRL's trainer seeds everything
        step.main(["--steps", "1", "--trl-python", sys.executable, *arguments(tmp_path, "step")])
    steps = written(tmp_path, "step")["measured"]["ragged"]["steps"]
    expected = [
        row_lengths(32, turn, most=6, mean=3.0) for turn in (1,)
    ]  # after the warm-up turn, 0
    assert (
        [turn["lengths"] for turn in steps["trl"]]
        == [turn["lengths"] for turn in steps["gruppo"]]
        == expected
    )
    size = [
        "--words",
        "1",
        "--new-tokens",
        "6",
        "--turns",
        "1",
        "--rows",
        "1",
        "16",
        "--sides",
        "gruppo",
        "hf-fp32",
    ]
    generate.main([*size, *arguments(tmp_path, "generate")])
    rows = written(tmp_path, "generate")["measured"]["16"]
    assert rows["hf-fp32"][0]["lengths"] == rows["gruppo"][0]["lengths"] == [6] * 16


def test_sides_take_turns_in_processes_of_their_own_and_one_that_ends_early_is_named() -> None:
    sides = [turns.Side(name, ["tests.counting_side", "3"]) for name in ("one", "other")]
    try:
        assert sides[0].ready["pid"] != sides[1].ready["pid"]
        done = turns.in_turns(sides, 2)
        assert done == {
            "one": [{"turn": 1}, {"turn": 2}],
            "other": [{"turn": 1}, {"turn": 2}],
        }  # after a warm-up
        with pytest.raises(SystemExit, match=r"the one side ended early\. no further turn"):
            sides[0].turn()
    finally:
        for side in sides:
            side.close()


# --- the page -------------------------------------------------------------------------------------


def test_a_table_of_the_page_is_replaced_and_nothing_else() -> None:
    machine = {
        "date": "2026-11-20",
        "gpu": None,
        "threads": 2,
        "cores": 2,
        "cpu": "X",
        "memory_gb": 25.0,
        "torch": "2",
    }
    rate = {"median": 90.4, "min": 80.0, "max": 100.0}
    ratio = {"median": 1.5, "min": 1.25, "max": 2.0}
    results = {"32": {"gruppo": rate, "vllm": rate | {"gruppo_over_it": ratio}}}
    page = (
        "before\n<!-- generate -->\nold\n<!-- end -->\nbetween\n<!-- step -->\nkept\n<!-- end -->\n"
    )
    assert tables.replaced(page, "generate", {"machine": machine, "results": results}) == (
        "before\n<!-- generate -->\n2026-11-20, 2 threads on 2 cores of X, 25 GB, torch 2:\n\n"
        "| rows |  | new tokens/s | gruppo over it |\n| --- | --- | --- | --- |\n"
        "| 32 | gruppo | 90 (80 to 100) |  |\n| 32 | vLLM | 90 (80 to 100) | 1.50 (1.25 to 2.00) "
        "|\n"
        "<!-- end -->\nbetween\n<!-- step -->\nkept\n<!-- end -->\n"
    )
    with pytest.raises(ValueError, match="has 0 places <!-- roofline -->"):
        tables.replaced(page, "roofline", {"machine": machine, "results": {}})


def test_the_page_has_a_place_for_every_table() -> None:
    page = tables.DOCUMENT.read_text(encoding="utf-8")
    assert all(page.count(f"<!-- {name} -->") == 1 for name in tables.TABLES)
