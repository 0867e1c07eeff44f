"""Rewards of steps in training: the three credits by hand, rewards of rows beside them, and whole
runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.rewards.classifiers import folder_of
from tests.rewards.test_step_rewards import Each
from tests.trainer.runs import Signalling, assert_same, metrics
from tests.trainer.test_step import run_in, step
from torch import Tensor

import gruppo
from gruppo import api
from gruppo.build import Parts
from gruppo.core.objective import GRPO, PPO, Objective
from gruppo.protocols import Policy
from gruppo.rewards import RewardSet, resolve_reward, step_reward
from gruppo.trainer.advantages import Scored, credit
from gruppo.trainer.loop import Stopped
from gruppo.types import Before, GruppoError, Likelihood, Prompt, Rollouts

NAN = float("nan")
STEPS = torch.tensor([[NAN, 1.0, NAN, NAN, 0.0], [1.0, NAN, 1.0, NAN, NAN]])
"""One group of two rows with two steps each; the four are 1, 0, 1, 1: mean 0.75, deviation (ddof 1)
0.5."""
EXACT = replace(GRPO, scale_eps=0.0)
HERE = Path(__file__).resolve()


def rollouts_of(
    lengths: Sequence[int] = (5, 3), *, group_ids: Sequence[int] | None = None
) -> Rollouts:
    size, columns = len(lengths), max(lengths)
    return Rollouts(
        prompts=tuple(Prompt(f"p{n}", "ask") for n in set(group_ids or [0])),
        group_ids=torch.tensor(group_ids or [0] * size),
        actions=torch.zeros(size, columns, dtype=torch.long),
        mask=torch.arange(columns) < torch.tensor(lengths)[:, None],
        lengths=torch.tensor(lengths),
        completions=("",) * size,
        sampler_logprobs=torch.zeros(size, columns),
        policy_version=torch.zeros(size, columns, dtype=torch.long),
        temperature=torch.ones(size),
        finish=("stop",) * size,
    )


def credited(
    objective: Objective, rewards: Sequence[Any], weights: Any = None, kl: Tensor | None = None
) -> Tensor:
    """The advantages of rewards that are given as tensors: [B, T] of steps, [B] of rows."""
    before = Before() if kl is None else Before(kl, ref=Likelihood(torch.zeros_like(kl)))
    step_params: Any = SimpleNamespace(kl_coef=0.0 if kl is None else 0.5)
    return credit(step_params, scored(objective, rewards, weights), before)[0]


def scored(objective: Objective, rewards: Sequence[Any], weights: Any = None) -> Scored:
    rollouts = rollouts_of()
    scorer = RewardSet([said(values) for values in rewards], weights)
    config = SimpleNamespace(objective=objective, rollout=SimpleNamespace(max_new_tokens=5))
    run: Any = SimpleNamespace(
        config=config,
        state=SimpleNamespace(running={}),
        critic=None,
        rewards=scorer,
        policy=Policy(),
    )
    scores = scorer.score(rollouts)
    return Scored(run, rollouts, scores)


def said(values: Any) -> Any:
    if values.ndim == 2:
        return Each(lambda rollouts: values[: len(rollouts)])

    def rows(completions: Sequence[Any]) -> Any:
        return [None if value != value else value for value in values.tolist()]

    return rows


def close(got: Tensor, wanted: Any) -> bool:
    return torch.allclose(got, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("credit", "wanted"),
    [
        ("outcome", [[-(0.5**0.5)] * 5, [0.5**0.5] * 3 + [0, 0]]),  # the sums 1 and 2
        ("return_to_go", [[-1.0, -1.0, -1.5, -1.5, -1.5], [1.0, 0.5, 0.5, 0, 0]]),
        ("position", [[0.5, 0.5, -1.5, -1.5, -1.5], [0.5, 0.5, 0.5, 0, 0]]),
    ],
)
def test_the_three_credits_by_hand(credit: Any, wanted: Any):
    assert close(credited(replace(EXACT, credit=credit), [STEPS]), wanted)


def test_a_weight_counts_for_steps_where_no_scale_divides_it_out():
    none = replace(EXACT, credit="return_to_go", scale="none")
    assert close(credited(none, [STEPS], [4.0]), [[-2.0, -2, -3, -3, -3], [2.0, 1, 1, 0, 0]])
    assert close(
        credited(replace(none, scale="group"), [STEPS], [4.0])[0], [-1.0, -1, -1.5, -1.5, -1.5]
    )


def test_rewards_of_rows_and_of_steps_are_compared_apart_and_added():
    """Rows 2 and 0 with weight 3: 3 and -3 to all actions; steps less their mean 0.75 beside
    them."""
    rows = torch.tensor([2.0, 0.0])
    none = replace(EXACT, credit="return_to_go", scale="none")
    expected = [[3 - 0.5, 3 - 0.5, 3 - 0.75, 3 - 0.75, 3 - 0.75], [-2.5, -2.75, -2.75, 0, 0]]
    assert close(credited(none, [STEPS, rows], [1.0, 3.0]), expected)
    own = [[3.25, 3.25, 2.25, 2.25, 2.25], [-2.75, -2.75, -2.75, 0, 0]]
    assert close(credited(replace(none, credit="position"), [STEPS, rows], [1.0, 3.0]), own)
    assert close(
        credited(replace(none, credit="outcome"), [STEPS, rows], [1.0, 3.0]),
        [[2.5] * 5, [-2.5] * 3 + [0, 0]],
    )


def test_each_normalised_first_their_sum_has_mean_0_and_variance_1_over_the_actions():
    apart = replace(EXACT, credit="return_to_go", combine="normalize_then_sum")
    got = credited(apart, [STEPS, torch.tensor([2.0, 0.0])], [1.0, 2.0])
    root = 2**0.5
    sums = [
        root - 1,
        root - 1,
        root - 1.5,
        root - 1.5,
        root - 1.5,
        1 - root,
        0.5 - root,
        0.5 - root,
    ]
    sums = torch.tensor(sums, dtype=torch.float64)
    expected = (sums - sums.mean()) / sums.std()
    assert torch.allclose(got[rollouts_of().mask].double(), expected, atol=1e-5)


def test_two_rewards_of_steps_are_added_action_by_action():
    other = torch.tensor([[NAN, 1.0, 2.0, NAN, NAN], [NAN, NAN, 1.0, NAN, NAN]])
    none = replace(EXACT, credit="position", baseline="none", scale="none")
    got = credited(none, [STEPS, other], [1.0, 0.5])
    assert close(got, [[1.5, 1.5, 1.0, 0.0, 0.0], [1.0, 1.5, 1.5, 0, 0]])


@pytest.mark.silent_bug(22)
def test_rows_without_a_step_are_unscored_and_in_no_mean():
    steps = torch.tensor([[NAN] * 5, [1.0, NAN, 3.0, NAN, NAN]])
    got = credited(
        replace(EXACT, credit="return_to_go", baseline="batch_mean", scale="none"), [steps]
    )
    assert close(got, [[0.0] * 5, [0.0, 1.0, 1.0, 0, 0]])
    assert scored(EXACT, [steps]).loss_mask.any(dim=1).tolist() == [False, True]
    assert not credited(
        replace(EXACT, credit="return_to_go"), [steps]
    ).any()  # nothing to compare its only row with


@pytest.mark.silent_bug(22)
def test_steps_of_a_row_that_another_reward_left_unscored_are_in_no_mean():
    rows = torch.tensor([NAN, 1.0])
    none = replace(EXACT, credit="return_to_go", baseline="batch_mean", scale="none")
    got = credited(none, [STEPS, rows])
    assert not got[0].any() and close(got[1], [0.0] * 5)  # its steps, 1 and 1, are the mean


def test_a_reward_of_steps_that_weighs_nothing_leaves_the_credit_of_rows():
    rows = torch.tensor([2.0, 0.0])
    got = credited(replace(EXACT, credit="return_to_go"), [STEPS, rows], [0.0, 1.0])
    assert close(got, [[0.5**0.5] * 5, [-(0.5**0.5)] * 3 + [0, 0]])


def test_the_kl_is_taken_off_each_action_after_the_steps_are_compared():
    kl = torch.tensor([[0.2, 0.0, 0.0, 0.4, 0.0], [0.0, 0.0, 0.6, 0.0, 0.0]])
    in_reward = replace(EXACT, credit="return_to_go", kl="k1", kl_in="reward")
    expected = [[-1.3, -1.2, -1.7, -1.7, -1.5], [0.7, 0.2, 0.2, 0, 0]]
    assert close(credited(in_reward, [STEPS], kl=kl), expected)
    own = [[0.4, 0.5, -1.5, -1.7, -1.5], [0.5, 0.5, 0.2, 0, 0]]
    assert close(credited(replace(in_reward, credit="position"), [STEPS], kl=kl), own)


def test_the_overlong_penalty_is_part_of_the_last_steps_reward():
    """The first row has 5 of at most 5 actions: -1. Its steps are 1 and -1."""
    late = replace(EXACT, credit="return_to_go", baseline="none", scale="none", overlong=2)
    assert close(credited(late, [STEPS]), [[0.0, 0, -1, -1, -1], [2.0, 1, 1, 0, 0]])


def test_a_critic_learns_each_steps_reward_where_it_ends_and_that_of_the_row_at_the_end():
    ppo = replace(PPO, overlong=2, gamma=1.0, lam=1.0)
    own = scored(ppo, [STEPS, torch.tensor([2.0, 4.0])], [1.0, 0.5])
    step_params: Any = SimpleNamespace(kl_coef=0.0)
    _, returns = credit(step_params, own, Before(old_values=torch.zeros(2, 5)))
    # the rewards [0, 1, 0, 0, 1 - 1] and [1, 0, 1 + 2, 0, 0], summed from each action on
    assert close(returns, [[1.0, 1, 0, 0, 0], [4.0, 3, 3, 0, 0]])


def test_under_gamma_a_step_counts_less_to_earlier_actions():
    half = replace(EXACT, credit="return_to_go", baseline="none", scale="none", gamma=0.5)
    assert close(credited(half, [STEPS])[1], [1.25, 0.5, 1.0, 0, 0])


# --- whole runs -----------------------------------------------------------------------------------


def vowels_in(text: str) -> float:
    return float(sum(c in "aeiou" for c in text))


@step_reward(separator="1")
def vowels(steps: Sequence[Sequence[str]], **_: Any) -> list[list[float]]:
    return [list(map(vowels_in, own)) for own in steps]


def quiet(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


CREDIT: dict[str, Any] = {"objective__credit": "return_to_go"}


def test_a_step_of_training_has_the_returns_of_the_steps_at_the_policys_own_tokens(tmp_path: Path):
    """A critic that knows nothing yet, lambda 1: the return of a token is what the steps from it on
    have earned."""
    changes: dict[str, Any] = {
        "objective": "ppo",
        "objective__lam": 1.0,
        "reward": [f"{HERE}:vowels"],
    }
    run = run_in(tmp_path, **changes)
    collected, said = step(run)
    rollouts, seen = collected.rollouts, 0
    for row, output in enumerate(rollouts.completions):
        letters = [
            run.policy.chat.text([i]) for i in rollouts.actions[row][rollouts.mask[row]].tolist()
        ]
        assert "".join(letters) == tiny.said(output)  # a token is a letter, or an end
        parts = tiny.said(output).split("1")
        before = ["".join(letters[:n]) for n in range(len(letters))]
        # a step's reward stands at its end, so each of its tokens has all of it and of those behind
        expected = [sum(vowels_in(part) for part in parts[text.count("1") :]) for text in before]
        assert collected.batch.returns[row][rollouts.mask[row]].tolist() == pytest.approx(expected)
        seen += "1" in tiny.said(output).strip("1")
    assert seen > 0 and said["update/updates_count"] >= 1
    assert collected.metrics["reward/vowels/steps_per_row_mean"] > 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"reward": [tiny.reward("digits")], "objective__credit": "position"},
            "credit='position' needs a reward for",
        ),
        (
            {"reward": [f"{HERE}:vowels", f"{HERE}:quiet"], **CREDIT},
            "Set objective__combine normalize_then_sum",
        ),
        (
            {"reward": [f"{HERE}:vowels", f"{HERE}:quiet"], "objective__credit": "position"},
            "Set objective__scale none",
        ),
        (
            {"reward": [f"{HERE}:vowels"], "objective__scale": "prompt", **CREDIT},
            "mean objective__scale group",
        ),
        (
            {
                "reward": [f"{HERE}:vowels"],
                "scoring__weights": [0.0],
                "objective__credit": "position",
            },
            "needs a reward for each action",
        ),
    ],
)
def test_what_rewards_cannot_give_is_refused_when_the_run_is_built(
    tmp_path: Path, changes: dict[str, Any], why: str
):
    with pytest.raises(GruppoError, match=why):
        gruppo.train(tiny.config(tmp_path, **changes), show=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.silent_bug(33)
def test_a_run_with_models_of_rows_and_of_steps_refills_stops_and_goes_on_to_the_bit(
    tmp_path: Path,
):
    prm = folder_of(tmp_path / "prm", "TokenClassification", 2)
    rm = folder_of(tmp_path / "rm", "SequenceClassification", 1)
    names = [f"process_reward:{prm},separator=1", f"reward_model:{rm}", f"{HERE}:quiet"]
    changes: dict[str, Any] = {
        "objective__combine": "normalize_then_sum",
        "objective__scale": "running",
        **CREDIT,
    }
    changes |= {"rollout__refill_rounds": 1, "optim__epochs": 2, "stage__kl_coef": 0.01, "steps": 4}
    config = tiny.config(tmp_path, reward=names, scoring__weights=(1.0, 0.5, 0.0), **changes)
    whole = api.start(config).folder
    stop = Signalling(5)

    def stopping(completions: Sequence[Any], **_: Any) -> list[float]:
        stop(completions)
        return [0.0] * len(completions)

    stopping.__name__ = "quiet"
    parts = Parts(rewards=[*map(resolve_reward, names[:2]), stopping])
    with pytest.raises(Stopped):
        api.start(replace(config, runs_dir=str(tmp_path / "stopped")), parts)
    assert_same(api.start(tmp_path / "stopped/run").folder, whole)
    rows = [row for row in metrics(whole) if "reward/mean" in row]
    assert all(0 < row["reward/process_reward/step_mean"] < 1 for row in rows)
    assert all(row["reward_metric/reward_model_truncated_frac"] == 0 for row in rows)
