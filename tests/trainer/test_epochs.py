"""What is said of each epoch of several, against ratios from the float64 steps written out by
hand."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
from tests.trainer import by_hand
from tests.trainer.test_ppo_step import REINFORCE_PP, SHARED, SLOW, begun
from tests.trainer.test_step import step

from gruppo.trainer.forward import minibatch_rows
from gruppo.trainer.run import Run

THREE: dict[str, Any] = {"optim__epochs": 3, "optim__minibatches": 2}
TIGHT = {"objective__clip_low": 0.02, "objective__clip_high": 0.04}
OLD, ADVANTAGES = (attrgetter(name) for name in ("old", "advantages"))


def by_minibatch(run: Run) -> tuple[dict[str, float], list[torch.Tensor]]:
    """What a step says; and by hand, log-ratios and advantages of each minibatch's tokens before
    its update."""
    networks, optim = by_hand.Networks.of(run), run.config.optim
    collected, logged = step(run)
    rollouts = collected.batch.rollouts
    rows = by_hand.credited(run, networks, rollouts, collected.batch.rewards.double().tolist())
    optimizers = [
        by_hand.AdamW(part, optim.lr, optim) for part in (networks.of_policy, networks.of_critic)
    ]
    moved = []
    for epoch in range(optim.epochs):
        for part in minibatch_rows(run, rollouts, epoch):
            own = {row: rows[row] for row in part.tolist() if row in rows}
            with torch.no_grad():
                now = torch.cat([networks.logprobs(networks.policy, rollouts, row) for row in own])
            old, advantages = (
                torch.tensor([x for row in own.values() for x in of(row)])
                for of in (OLD, ADVANTAGES)
            )
            moved.append(torch.stack([now - old, advantages]))
            by_hand.update(run, networks, rollouts, own, optimizers)
    return logged, moved


@pytest.mark.silent_bug(41)
@pytest.mark.parametrize("kind", [SHARED, REINFORCE_PP], ids=["ppo", "reinforce_pp"])
def test_each_epochs_ratio_clip_and_kl_are_those_of_the_steps_by_hand(tmp_path, kind):
    run = begun(tmp_path, kind, **(SLOW | THREE | TIGHT))
    result, moved = by_minibatch(run)
    counts, sums = [], torch.zeros(2, dtype=torch.float64)
    for number in (1, 2, 3):
        log_ratio, advantages = torch.cat(moved[2 * number - 2 : 2 * number], dim=1)
        ratio = log_ratio.exp()
        clipped = ((ratio > 1.04) & (advantages > 0)) | ((ratio < 0.98) & (advantages < 0))
        got = {
            name.removeprefix(f"epoch/{number}/"): x
            for name, x in result.items()
            if name.startswith(f"epoch/{number}/")
        }
        assert got == {
            "ratio_max": pytest.approx(float(ratio.max()), rel=1e-4),
            "clip_frac": pytest.approx(float(clipped.double().mean()), abs=1.5 / len(ratio)),
            "kl_old_k3_nats": pytest.approx(
                float((ratio - 1 - log_ratio).mean()), rel=1e-3, abs=1e-9
            ),
        }
        counts.append(float(clipped.sum()))
        sums += torch.stack([ratio.sum(), torch.tensor(float(len(ratio)))])
    assert (
        0 < counts[0] < counts[1] < counts[2]
    )  # the first epoch's second minibatch is not on-policy any more
    assert result["ratio/mean"] == pytest.approx(float(sums[0] / sums[1]), rel=1e-5)
    assert result["update/epochs_count"] == 3 and "epoch/4/ratio_max" not in result


@pytest.fixture(scope="module")
def kls(tmp_path_factory) -> list[float]:
    """Of each minibatch before its update, where nothing ends the batch."""
    _, moved = by_minibatch(begun(tmp_path_factory.mktemp("unlimited"), SHARED, **(SLOW | THREE)))
    return [float((log_ratio.expm1() - log_ratio).mean()) for log_ratio, _ in moved]


@pytest.mark.parametrize(("updates", "epochs"), [(2, 1.0), (3, 1.5)])
def test_where_the_kl_ends_a_batch_is_said_in_epochs(kls, tmp_path, updates, epochs):
    """The limit lies between two minibatches' KL; the one that is too far is evaluated, and takes
    no update."""
    assert max(kls[:updates]) < kls[updates]
    limit = (max(kls[:updates]) + kls[updates]) / 2
    _, logged = step(begun(tmp_path, SHARED, **(SLOW | THREE), optim__stop_kl=limit))
    assert logged["update/updates_count"] == updates
    assert logged["update/early_stop_frac"] == 1 and logged["update/epochs_count"] == epochs
    begun_epochs = int(epochs) + 1
    assert logged[f"epoch/{begun_epochs}/ratio_max"] > 1
    assert not [name for name in logged if name.startswith(f"epoch/{begun_epochs + 1}/")]
