"""On a GPU nothing between the first forward and the optimizer step waits for the device; shown on
the CPU.

The tensors that a GPU would hold are followed from the weights on. Whatever would copy a number of
theirs to the host is recorded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer.test_step import run_in, step, vector
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gruppo import types
from gruppo.build import Parts
from gruppo.losses import GRPOLoss
from gruppo.trainer import update
from gruppo.types import NumericalStop, Stat

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


class Following(TorchDispatchMode):
    """Follows storages that descend from the weights, through autograd too, and records what reads
    them."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept = {weight.untyped_storage().data_ptr(): weight for weight in weights}
        self.waits: list[str] = []

    def follows(self, tensors: Any) -> bool:
        return any(x.untyped_storage().data_ptr() in self.kept for x in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_followed, name = self.follows(inputs), func.overloadpacket.__name__
        indexes = name in ("index", "index_put", "index_put_") and any(
            x.dtype == torch.bool for x in inputs[1:]
        )
        if is_followed and (name in WAITS or indexes):
            self.waits.append(name)
        out = func(*args, **(kwargs or {}))
        if is_followed:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self.kept.setdefault(x.untyped_storage().data_ptr(), x)
        return out


class Reading(TorchFunctionMode):
    """Records methods that read numbers without an operator."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self.following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in (
            "tolist",
            "item",
            "__bool__",
            "__float__",
            "__int__",
            "numpy",
            "cpu",
            "__contains__",
        )
        if reads and self.following.follows([args[0]]):
            self.following.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def deferred(monkeypatch):
    monkeypatch.setattr(types, "AT_ONCE", frozenset())


def waits_before_the_step(run, monkeypatch) -> list[str]:
    """What a step of training waits for between its first forward and the end of
    ``optimizer.step``."""
    following = Following([p.data for p in run.policy.compute_module.parameters()])
    take, backward = run.optimizer.step, update.backward
    modes = [following, Reading(following)]
    seen: list[int] = []

    def watched_backward(*args):
        for mode in modes:
            mode.__enter__()
        return backward(*args)

    def watched_step(*args):
        take(*args)
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        seen.append(len(following.kept))

    monkeypatch.setattr(update, "backward", watched_backward)
    monkeypatch.setattr(run.optimizer, "step", watched_step)
    step(run)
    assert seen and seen[0] > 100, "the step was followed"
    return following.waits


CHANGES = {
    "grpo": {},
    "bfloat16": {"compute": "bfloat16"},
    "kl, entropy": {"stage__kl_coef": 0.1, "stage__entropy_coef": 0.01, "optim__token_budget": 60},
    "correction": {"objective__correction": "truncate"},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_nothing_between_forward_and_optimizer_step_waits_for_the_device(
    tmp_path, changes, deferred, monkeypatch
):
    assert waits_before_the_step(run_in(tmp_path, **changes), monkeypatch) == []


def test_what_waits_is_seen(tmp_path, monkeypatch):
    assert {"tolist", "index", "__float__"} <= {
        *waits_before_the_step(run_in(tmp_path), monkeypatch)
    }


def test_a_deferred_step_has_the_weights_and_metrics_of_one_that_reads_at_once(
    tmp_path, monkeypatch
):
    results = []
    for at_once in (frozenset({"cpu"}), frozenset()):
        monkeypatch.setattr(types, "AT_ONCE", at_once)
        run = run_in(
            tmp_path / str(len(results)),
            optim__token_budget=60,
            optim__epochs=2,
            stage__kl_coef=0.1,
        )
        _, metrics = step(run)
        results.append((vector(run.policy.module), metrics))
    (weights, expected), (deferred_weights, metrics) = results
    assert torch.equal(weights, deferred_weights) and metrics.keys() == expected.keys()
    times = {"time/update_s"}
    assert {k: v for k, v in metrics.items() if k not in times} == pytest.approx(
        {k: v for k, v in expected.items() if k not in times}, rel=1e-9, nan_ok=True
    )


def test_pending_statistics_are_those_of_the_numbers():
    x = torch.tensor([[1.0, -2.0, torch.nan], [4.0, 5.0, 6.0]])
    where = torch.tensor([[True, True, False], [True, False, True]])
    expected = Stat.of(x, where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(types, "AT_ONCE", frozenset())
        parts = {
            "both": Stat.of(x[:1], where[:1]) + Stat.of(x[1:], where[1:]),
            "none": Stat.of(x, where & False),
        }
        parts |= {
            "empty": Stat.of(x[:0]),
            "rows": Stat.of(x, torch.tensor([False, True])),
            "number": Stat.of(x[0, 0]),
        }
        assert parts["both"].pending and not parts["both"].count
    read = Stat.read(parts)
    assert read["both"] == expected and read["none"] == read["empty"] == Stat()
    assert read["rows"] == Stat(3, 15, 77, 4, 6) and read["number"] == Stat(1, 1, 1, 1, 1)


def test_losses_for_other_loops_have_read_their_statistics(deferred):
    logprobs = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)) - 3
    _, stats = GRPOLoss(kl_beta=0).terms(
        logprobs, logprobs + 0.1, torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    )
    assert stats["reward"].mean == 0.5 and stats["kl/old_nats"].mean == pytest.approx(0.1, rel=1e-5)
    assert not any(stat.pending for stat in stats.values())


def test_the_optimizer_leaves_out_a_step_that_is_not_finite_and_three_end_the_run(
    tmp_path, deferred
):
    run = run_in(tmp_path, Parts(rewards=[tiny.digits]))
    step(run)
    run.policy.module.model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    before, moments = (
        vector(run.policy.module),
        [s["exp_avg"].clone() for s in run.optimizer.state.values()],
    )
    for attempt in range(3):
        if attempt == 2:
            with pytest.raises(NumericalStop, match="3 updates in a row"):
                step(run)
        else:
            _, metrics = step(run)
            assert metrics["update/skipped_count"] == 1 and metrics["update/updates_count"] == 0
    assert torch.equal(vector(run.policy.module), before)
    after = [state["exp_avg"] for state in run.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))
