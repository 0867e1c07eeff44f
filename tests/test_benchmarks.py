"""The benchmarks run, on the smallest settings, and their sums are right."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import curves, demonstrations, grpo_vs_ppo, presets, sorting, variants
from tests import processes, tiny

from gruppo.core.objective import PRESETS


def run_of(preset: str, seed: int, accuracy: list[float]) -> dict[str, Any]:
    steps = [10 * n for n in range(len(accuracy))]
    lr = {
        "lr": 1e-3,
        "updates_per_batch": 4,
        "seconds_per_step": 0.5 + seed,
        "explained_variance": None,
    }
    return {"preset": preset, "seed": seed, "steps": steps, "accuracy": accuracy, **lr}


def test_half_is_half_of_what_was_missing_before_training() -> None:
    assert presets.steps_to_half(run_of("grpo", 0, [0.4, 0.6, 0.7, 0.9])) == 20
    assert presets.steps_to_half(run_of("grpo", 0, [0.4, 0.6, 0.69])) is None


def test_a_summary_is_over_the_seeds_of_a_preset() -> None:
    runs = [
        run_of("grpo", 0, [0.2, 0.8]),
        run_of("grpo", 1, [0.4, 0.6]),
        run_of("ppo", 0, [0.2, 0.3]),
    ]
    found = presets.summarise(runs)
    assert found["grpo"]["final"] == [0.8, 0.6] and found["grpo"]["final_mean"] == pytest.approx(
        0.7
    )
    assert found["grpo"]["steps_to_half"] == [10, None] and found["grpo"]["seconds_per_step"] == 1.0
    assert found["ppo"]["final_mean"] == 0.3 and found["ppo"]["over_run_mean"] == pytest.approx(
        0.25
    )
    band = curves.bands(runs)["grpo"]
    assert (
        band.mean == pytest.approx([0.3, 0.7])
        and band.low == [0.2, 0.6]
        and band.high == [0.4, 0.8]
    )


def test_every_preset_has_settings_that_its_objective_allows() -> None:
    for name in (*PRESETS, presets.CONTROL):
        config = presets.config(name, 0, 80)
        config.objective.check(group_size=8, updates_per_row=config.updates_per_batch)
        assert config.updates_per_batch == (
            1 if name in ("rloo", "reinforce", "nanochat", "grpo_once") else 4
        )
        assert config.rollout == presets.config("grpo", 0, 80).rollout


def test_the_start_of_a_seed_is_the_same_each_time_and_no_other_seeds() -> None:
    first, again, other = (sorting.started(seed).head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.slow
def test_a_preset_is_trained_on_the_sorting_task(tmp_path: Path) -> None:
    one = presets.run("ppo", seed=0, steps=2)
    assert one["steps"] == [0, 1, 2] and 0.1 < one["accuracy"][0] < 0.6
    picture = tmp_path / "curves.png"
    curves.draw([one, one | {"preset": "grpo"}], picture)
    assert picture.stat().st_size > 10_000
    assert "no training" in presets.table(presets.summarise([one]))


def spec_of(variant: str, kl_coef: float = 0.0) -> dict[str, Any]:
    size = {"prompts": 2, "group_size": 2, "new_tokens": 4, "words": 1, "steps": 1, "passes": 1}
    return size | {
        "model": tiny.model(),
        "compute": "float32",
        "variant": variant,
        "kl_coef": kl_coef,
    }


def test_all_variants_learn_from_the_same_actions_and_hold_what_they_must() -> None:
    results = {
        kl: {name: variants.measure(spec_of(name, coef)) for name in variants.VARIANTS}
        for kl, coef in (("off", 0.0), ("on", 0.1))
    }
    grpo_vs_ppo.check_same_rollouts(results)
    held = {
        kl: {name: one["held_gib"] for name, one in of_kl.items()} for kl, of_kl in results.items()
    }
    weights = held["off"]["grpo"] / 4  # a weight, its gradient and Adam's two moments
    assert held["on"]["grpo"] == pytest.approx(5 * weights, rel=0.02)
    assert held["off"]["ppo-separate"] == pytest.approx(8 * weights, rel=0.02)


def test_unequal_work_is_refused() -> None:
    step = {"rollouts_sha256": "a", "update_tokens": 8}
    with pytest.raises(
        SystemExit, match="ppo-shared, KL off learned from other actions than grpo, KL off"
    ):
        grpo_vs_ppo.check_same_rollouts(
            {
                "off": {
                    "grpo": {"steps": [step]},
                    "ppo-shared": {"steps": [step | {"update_tokens": 6}]},
                }
            }
        )


def test_ratios_are_of_medians_and_grpo_is_one() -> None:
    def one(seconds: list[float], gib: float) -> dict[str, Any]:
        steps = [
            {"seconds": s, "rollout_s": 1.0, "credit_s": 0.0, "update_s": s - 1} for s in seconds
        ]
        return {"steps": steps, "peak_gib": gib, "held_gib": gib}

    found = grpo_vs_ppo.summarise(
        {"off": {"grpo": one([2, 9, 3], 2.0), "ppo-shared": one([6, 5, 7], 3.0)}}
    )["off"]
    assert found["grpo"]["seconds_ratio"] == 1 and found["grpo"]["seconds_max"] == 9
    assert (
        found["ppo-shared"]["seconds_ratio"] == 2 and found["ppo-shared"]["update_s_ratio"] == 2.5
    )
    assert (
        "of ppo-shared with KL off 67% of the peak memory and 50% of the time"
        in grpo_vs_ppo.verdict({"off": found})
    )


def as_main(module: str, *arguments: str) -> None:
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__")


@pytest.mark.slow
def test_both_commands_print_a_table_and_write_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forked(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """The process of ``command``, from one that has imported torch."""
        module = command.index("-m") + 1
        child = processes.start(as_main, *command[module:], folder=tmp_path / "child")
        return subprocess.CompletedProcess(command, child.wait(), child.out, child.err)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", forked)
        assert grpo_vs_ppo.in_own_process(spec_of("grpo"))["peak_gib"] > 0
    monkeypatch.setattr(grpo_vs_ppo, "in_own_process", lambda spec: variants.measure(dict(spec)))
    small = "--prompts 2 --group-size 2 --new-tokens 4 --steps 1 --kl off --compute float32"
    grpo_vs_ppo.main([*small.split(), "--model", tiny.model(), "--json", str(tmp_path / "a")])
    assert {"grpo", "ppo-shared", "ppo-separate"} == json.loads((tmp_path / "a").read_text())[
        "summary"
    ]["off"].keys()
    monkeypatch.setattr(
        presets, "get_context", lambda kind: processes._server
    )  # it has imported torch
    small = "--only grpo --seeds 1 --steps 1 --processes 1"
    presets.main([*small.split(), "--json", str(tmp_path / "b"), "--plot", str(tmp_path / "c.png")])
    assert (
        len(json.loads((tmp_path / "b").read_text())["runs"]) == 1
        and (tmp_path / "c.png").is_file()
    )
    assert "steps to half" in capsys.readouterr().out


def evaluated(had: float, *pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [
        {"seconds": seconds, "had": had, demonstrations.METRIC: value} for seconds, value in pairs
    ]


def test_runs_are_compared_at_the_time_that_all_have_had_by_their_last_evaluation_until_then() -> (
    None
):
    found = {
        "both": {
            0: evaluated(90, (0, 0.0), (30, 0.5), (80, 0.75)),
            1: evaluated(60, (0, 0.0), (50, 0.5)),
        },
        "alone": {0: evaluated(100, (0, 0.0), (40, 0.125), (100, 1.0))},
    }
    assert demonstrations.shared_seconds(found) == 60
    lines = demonstrations.table(found, parts=2).splitlines()
    assert lines[0] == "| variant | 30 s | 60 s |"
    assert lines[2:] == [
        "| demonstrations, then rewards | 0.250 (0.500, 0.000) | 0.500 (0.500, 0.500) |",
        "| rewards alone | 0.000 (0.000) | 0.125 (0.125) |",
    ]


def test_a_run_stops_when_it_has_had_its_time_and_what_it_stamped_is_read(tmp_path, capsys) -> None:
    small = (
        "--rollout.prompts 2 --rollout.group-size 2 --evaluation.prompts 2 --evaluation.every "
        "1 --compute float32"
    )
    own = [
        "--runs-dir",
        str(tmp_path),
        "--name",
        "both-s0",
        "--model",
        tiny.model(),
        *small.split(),
    ]
    demonstrations.run_one(own, seconds=0.0)
    rows = demonstrations.stamps(tmp_path, ["both", "alone"], [0])["both"][0]
    assert [(row["step"], row["seconds"], row["eval/in_tags"]) for row in rows] == [(0, 0.0, 0.0)]
    demonstrations.main(
        ["--read", "--runs-dir", str(tmp_path), "--plot", str(tmp_path / "curves.png")]
    )
    assert "| demonstrations, then rewards | 0.000 (0.000) |" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 1000
