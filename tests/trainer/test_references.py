"""References in whole runs: chosen, sampled from, proved frozen, saved and watched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.collecting import collect
from tests.trainer.runs import Signalling, metrics, newest, tensors

from gruppo import api
from gruppo.api import explain
from gruppo.build import Parts, build
from gruppo.trainer import checkpoint, checks
from gruppo.trainer.evaluate import evaluate, evaluate_reference, held_out
from gruppo.trainer.loop import Stopped, steps
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import learn
from gruppo.types import GruppoError

KL = {"stage__kl_coef": 0.1}
MIXED = KL | {
    "reference__kind": "mixed",
    "reference__update_every": 2,
    "reference__update_rate": 0.5,
}
LORA = {"lora__rank": 2}
KINDS = {
    "device": KL,
    "cpu": KL | {"reference__place": "cpu"},
    "mixed": MIXED,
    "mixed on the CPU": MIXED | {"reference__place": "cpu"},
    "base": KL | LORA,
    "mixed adapter": MIXED | LORA,
}
UPDATES = {
    "one update": {},
    "several": {"optim__epochs": 2, "optim__minibatches": 2},
    "KL in the reward": {"objective": {"kl": "k1", "kl_in": "reward", "credit": "return_to_go"}},
    "a critic": {"objective": "ppo"},
    "bfloat16": {"compute": "bfloat16", "optim__token_budget": 60},
}


def built(folder: Path, **changes: Any) -> Any:
    return build(tiny.config(folder, **changes), Parts())[0]


def trained(folder: Path, name: str = "run", **changes: Any) -> Path:
    return api.start(
        tiny.config(folder, name=name, **({"steps": 4, "evaluation__prompts": 0} | changes))
    ).folder


def own_bits(run: Path) -> dict[str, dict[str, str]]:
    """All tensors of the newest checkpoint."""
    return {path.name: tensors(path) for path in newest(run).glob("*.safetensors")}


# --- which one ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rule", "shares_module"),
    [
        ({}, None, False),
        ({"reference__kind": "frozen"}, None, False),
        (KL, "frozen", False),
        (KINDS["cpu"], "frozen", False),
        (MIXED, "ema", False),
        (KINDS["base"], "adapter_off", True),
        (KINDS["mixed adapter"], "ema", True),
    ],
)
def test_the_config_says_which_reference_there_is(tmp_path, changes, rule, shares_module):
    reference = built(tmp_path, **changes).reference
    assert (reference is None) == (rule is None)
    if reference is not None:
        assert (reference.rule, reference.shares_module) == (rule, shares_module)
        assert reference.is_offloaded == ("reference__place" in changes)


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize(
    ("kind", "updates"),
    [
        *((kind, "one update") for kind in KINDS),
        *(("device", updates) for updates in UPDATES if updates != "one update"),
        ("mixed adapter", "bfloat16"),
    ],
)
def test_the_kl_is_exactly_zero_before_the_policy_moves(tmp_path, kind, updates):
    run = built(tmp_path, **(KINDS[kind] | UPDATES[updates] | {"optim__lr": 0.0}))
    for _ in range(2):
        step_params = step_params_at(run.config, run.state.step)
        measured = learn(run, collect(run, step_params).batch, step_params)
        # minibatches place small groups in other attention blocks than the reference did: rounding
        limit = 1e-7 if updates == "several" else 0.0
        assert abs(measured["kl/ref_nats"]) <= limit and abs(measured["kl/old_nats"]) <= limit
        run.state.step += 1
        run.reference.update(run.policy, run.state.step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "updates"),
    [
        (("device", "cpu"), "KL in the reward"),
        (("device", "cpu"), "bfloat16"),
        (("mixed", "mixed on the CPU"), "several"),
    ],
)
def test_where_the_weights_rest_changes_no_bit_of_the_run(tmp_path, places, updates):
    runs = [trained(tmp_path, name, **(KINDS[name] | UPDATES[updates])) for name in places]
    first, *others = ((metrics(run), own_bits(run)) for run in runs)
    assert max(row["kl/ref_nats"] for row in first[0]) > 1e-3
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["cpu", "mixed on the CPU"])
def test_weights_that_rest_are_released_before_any_update(tmp_path, kind):
    run = built(tmp_path, **KINDS[kind])
    sizes: list[int] = []
    likelihood = run.policy.likelihood

    def watched(*arguments: Any, **options: Any) -> Any:
        sizes.append(sum(p.numel() for p in run.reference.module.parameters()))
        return likelihood(*arguments, **options)

    run.policy.likelihood = watched
    step_params = step_params_at(run.config, 0)
    batch = collect(run, step_params).batch
    assert batch.ref is not None and batch.old_logprobs is None and not sizes
    learn(run, batch, step_params)
    assert sizes and not any(sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            MIXED | {"reference__update_rate": 1.5},
            r"update_rate=1.5 is out of range; it needs to be at least 0 and at most 1",
        ),
        (MIXED | {"reference__update_rate": float("nan")}, r"update_rate=nan is out of range"),
        (
            MIXED | {"reference__update_every": 0},
            r"update_every=0 is out of range; it needs to be at least 1",
        ),
        (MIXED | {"reference__watch_prompts": -1}, r"watch_prompts=-1 is out of range"),
    ],
)
def test_a_reference_that_cannot_be_is_refused_before_anything_is_loaded(
    tmp_path, changes, message
):
    with pytest.raises(GruppoError, match=message):
        checks.check(tiny.config(tmp_path, **changes))


def test_explain_says_what_a_reference_costs_and_what_a_moving_one_means(tmp_path):
    def explained(kind: str) -> str:
        return "\n".join(explain(tiny.config(tmp_path, **KINDS[kind])))

    of_memory = re.compile(r"^  reference +[\d.]+ MiB$", re.MULTILINE)
    assert of_memory.search(explained("device")) and "no anchor" not in explained("device")
    assert "no anchor to where it began" in explained("mixed").replace("\n              ", " ")
    assert not any(of_memory.search(explained(kind)) for kind in ("base",))


# --- a frozen one is frozen -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("kind", ["device", "cpu", "base", "mixed adapter"])
def test_the_frozen_weights_have_one_hash_from_the_manifest_to_the_end(tmp_path, kind):
    run = built(tmp_path, **KINDS[kind])
    folder = api.RunFolder(tmp_path / "runs/run")
    folder.create(run.config)
    folder.write_manifest(run, {})
    then = json.loads((folder.path / "manifest.json").read_text())["reference_sha256"]
    list(steps(run, folder))
    folder.close()
    assert then and then == run.reference_sha256 and len(then) == 64
    assert (
        built(tmp_path / "anew", **KINDS[kind]).reference.frozen_state_dict().keys()
        == run.reference.frozen_state_dict().keys()
    )


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("kind", ["device", "base"])
def test_a_run_whose_reference_was_changed_stops_and_keeps_the_saves_before(tmp_path, kind):
    run = built(tmp_path, **KINDS[kind], saving__every=1, evaluation__prompts=0)
    folder = api.RunFolder(tmp_path / "runs/run")
    folder.create(run.config)
    update = run.reference.update

    def spoiling(policy: Any, step: int) -> None:
        update(policy, step)
        if step == 3:
            next(iter(run.reference.frozen_state_dict().values()))[0] += 1e-3

    run.reference.update = spoiling
    with pytest.raises(
        GruppoError,
        match=r"step 3: the frozen weights of the reference have changed since the start",
    ):
        list(steps(run, folder))
    folder.close()
    assert checkpoint.steps(folder.checkpoints)[-1] == 2


def test_resuming_with_another_reference_than_the_manifest_proves_is_refused(tmp_path):
    run = stopped(tmp_path, KL, at=3)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"reference_sha256": "0" * 64}))
    with pytest.raises(GruppoError, match="frozen weights of the reference have changed"):
        api.start(run)


# --- saved and resumed ----------------------------------------------------------------------------


def stopped(folder: Path, changes: dict[str, Any], *, at: int) -> Path:
    stop = Signalling(at)

    def stopping(completions: Any, **_: Any) -> list[float]:
        return stop(completions)

    stopping.__name__ = "digits"
    config = tiny.config(folder, **({"steps": 6, "saving__every": 0} | changes))
    with pytest.raises(Stopped):
        api.start(config, Parts(rewards=[stopping]))
    return folder / "runs/run"


@pytest.mark.slow
@pytest.mark.silent_bug(19)
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("kind", ["mixed on the CPU", "mixed adapter", "base"])
def test_a_reference_is_resumed_to_the_bit(tmp_path, kind):
    whole = api.start(
        tiny.config(tmp_path / "whole", **KINDS[kind], steps=6, saving__every=0)
    ).folder
    calls = (
        9 if "mixed" in kind else 7
    )  # evaluations, some of the reference too, at 0 and 3; steps 1 to 5
    run = stopped(tmp_path / "stopped", KINDS[kind], at=calls)
    assert checkpoint.steps(run / "checkpoints") == [4]
    moves = "reference.safetensors" in own_bits(run)
    assert moves == (kind != "base")
    first = built(tmp_path / "first", **KINDS[kind]).reference.state_dict()
    saved = load_file(newest(run) / "reference.safetensors") if moves else {}
    assert not moves or any(not torch.equal(saved[name], tensor) for name, tensor in first.items())
    api.start(run)
    assert own_bits(run) == own_bits(whole) and metrics(run) == metrics(whole)
    assert max(row.get("kl/ref_nats", 0) for row in metrics(run)[-3:]) > 1e-3


# --- a watch on one that moves --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixed", "mixed on the CPU", "mixed adapter"])
def test_a_mixed_reference_is_watched_at_each_evaluation(tmp_path, kind):
    changes = KINDS[kind] | {
        "reference__update_rate": 1.0,
        "evaluation__every": 1,
        "reference__watch_prompts": 4,
    }
    rows = metrics(trained(tmp_path, **(changes | {"evaluation__prompts": 4})))
    assert [row["step"] for row in rows if "reference/distance_frac" in row] == [0, 1, 2, 3, 4]
    of = {row["step"]: row for row in rows}
    assert [row["reference/distance_frac"] == 0 for row in of.values()] == [
        True,
        False,
        True,
        False,
        True,
    ]
    for at, copied_at in (
        (0, 0),
        (1, 0),
        (2, 2),
        (3, 2),
        (4, 4),
    ):  # what it answered with is the policy of then
        assert of[at]["reference/eval_reward_mean"] == of[copied_at]["eval/reward_mean"]


def test_the_reference_is_judged_on_so_many_held_out_prompts(tmp_path):
    two, four = (
        evaluate_reference(built(tmp_path, **MIXED, reference__watch_prompts=count))
        for count in (2, 4)
    )
    run = built(tmp_path)
    assert two["reference/eval_reward_mean"] == evaluate(run, held_out(run, 2))[0].mean
    assert two["reference/eval_reward_mean"] != four["reference/eval_reward_mean"]
