"""Collect: prompts, samples, rewards, advantages; with dynamic sampling, groups with equal rewards
are resampled with new prompts (DAPO), and groups with spread grow.

A step has ``prompts`` slots over all ranks; a slot keeps its rank and its place. Which slots are
empty is agreed on by all ranks and new prompts are taken by all of them in one order, so that the
number of ranks changes no batch.

Growth: a few samples of each prompt first, and more where their rewards differ. A step has a budget
of prompts x group_size samples over all ranks. What the first samples leave of it goes to the
groups with spread, up to a maximum size; groups without spread stay as they are and have no
advantage. New samples continue the numbering of their group's, so that a sample is the same however
its group came to its size.

Selection by the first rewards is not neutral. A group stays small where its first samples happened
to be equal, which a further sample might have changed: prompts that are nearly always or nearly
never answered are learned from less often than if all were sampled to the end. And a row is a row
in the loss: a group weighs as much as it has grown. For rewards of two values this changes how much
a prompt weighs and not in which direction it pulls: given its rewards, a group's expected gradient
is n m (1 - m) times the same vector, m being their mean and n their number, before any scale. For
other rewards the direction may change too. Reinforce-Ada (Xiong et al. 2025, arXiv 2510.04996)
samples in rounds until a group has what it needs, and then learns from as many rows of each;
GVM-RAFT (Yao et al. 2025, arXiv 2505.02391) sizes groups by the share of right answers that a first
round estimates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import RolloutConfig
from gruppo.core.groups import allocate_samples, group_std, has_no_spread
from gruppo.environments import environment_failures
from gruppo.rewards.scoring import Scores, applies_to_group
from gruppo.trainer.advantages import Scored, assemble
from gruppo.trainer.demonstrations import demonstrations
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import DataError, NumericalStop, Prompt, Request, Rollouts, TrainBatch

log = logging.getLogger("gruppo")

MAX_UNSCORED_STEPS = 10
"""Consecutive steps without a scored row that end the run: it would learn nothing."""
MAX_UNUSABLE = 100
"""Consecutive prompts that cannot be sampled from, which end the run."""


@dataclass(frozen=True, eq=False)
class Round:
    """What one round of generation gave this rank."""

    rollouts: Rollouts
    scores: Scores
    slots: list[int]
    """Slot of each prompt, among those of all ranks."""

    def reward_std(self) -> Float[Tensor, "P"]:
        """Return the standard deviation of each group's rewards, 0 if they are equal or fewer than
        two rows are scored.

        Of the sum of all rewards, before it is shaped.
        """
        rewards, group_ids = self.scores.rewards, self.rollouts.group_ids
        # equal but for rounding, which a standard deviation would show
        return torch.where(has_no_spread(rewards, group_ids), 0.0, group_std(rewards, group_ids))


@dataclass(frozen=True, eq=False)
class Sampled:
    """All rounds of a step, on this rank."""

    rollouts: Rollouts
    """All samples: the batch's rows, and those that were discarded."""
    scores: Scores
    rows: list[int]
    """Rows of the batch: each slot's last group, in order of the slots."""
    is_filled: Bool[Tensor, "b"]
    """Whether each of them is in a group to learn from."""
    rounds: Sequence[Round]
    grown: Round | None
    """More samples of slots' last groups."""

    def batch(self) -> tuple[Rollouts, Scores]:
        """Return the rows of the batch. Those of an unfilled slot are in no statistic: they have no
        reward."""
        rollouts, scores = self.rollouts, self.scores
        if self.rows != list(range(len(rollouts))):
            rollouts, scores = rollouts.take(self.rows), scores.take(self.rows)
        rewards = scores.rewards.where(self.is_filled, torch.nan)
        return rollouts, replace(scores, rewards=rewards)


@dataclass(frozen=True, eq=False)
class Collected:
    """The data of a step."""

    batch: TrainBatch
    sampled: Sampled | None = None
    """All samples; None if nothing was sampled."""

    @property
    def rollouts(self) -> Rollouts | None:
        return None if self.sampled is None else self.sampled.rollouts

    @property
    def scores(self) -> Scores | None:
        return None if self.sampled is None else self.sampled.scores


def collect(run: Run, step_params: StepParams) -> Collected:
    """Return one step's data: every prompt ``group_size`` times, rewarded, with advantages;
    demonstrations; or both."""
    if run.environment is not None:
        run.environment.elapsed_s = 0.0  # evaluations add to it too
    demos = demonstrations(run, step_params)
    if not step_params.samples:
        empty = torch.zeros(0, 0)
        batch = TrainBatch(
            rollouts=None,
            demos=demos,
            rewards=torch.zeros(0),
            loss_mask=empty.bool(),
            advantages=empty,
        )
        return Collected(batch)
    with run.recorder.time("rollout"), whole_weights(run.policy, engine=run.config.engine.kind):
        sampled = sample(run, step_params)
    _stop_if_useless(run, sampled.rollouts, sampled.scores)
    with run.recorder.time("credit"):
        batch = assemble(step_params, Scored(run, *sampled.batch()))
    return Collected(replace(batch, demos=demos), sampled)


def sample(run: Run, step_params: StepParams) -> Sampled:
    """Sample and score every slot's prompt; resample groups without spread, within the budget of
    rounds; and at last grow groups with spread."""
    config, group_size = run.config.rollout, step_params.group_size
    # where groups may grow, the first samples only
    size = config.first_samples or group_size
    slots = list(range(config.prompts))
    rounds: list[Round] = []
    latest: Round | None = None
    sampled = 0
    for number in range(1 + config.refill_rounds):
        if number:
            slots = _slots_without_spread(config.prompts, latest)
            if not slots:
                break
        latest = _round(run, step_params, _requests(run, slots, size))
        rounds += [latest] if latest else []
        sampled += len(slots) * size
    grown = None
    if config.first_samples:
        more = further_requests(rounds, config, group_size, sampled=sampled)
        grown = _round(run, step_params, more)
    return join_rounds(rounds, grown, run.rewards.weights, refills=config.refill_rounds > 0)


def join_rounds(
    rounds: Sequence[Round], grown: Round | None, weights: Sequence[float], *, refills: bool
) -> Sampled:
    """Join all that was sampled in a step, and find which of it is the batch.

    ``weights``: of the rewards. ``refills``: whether groups without spread are discarded.
    """
    every_round = list(rounds) if grown is None else [*rounds, grown]
    rows_of: dict[int, list[int]] = {}  # by slot, in order: the first round has all of them
    is_filled: dict[int, bool] = {}
    first = 0
    for one in every_round:
        has_spread = one.reward_std() != 0
        for group, slot in enumerate(one.slots):
            own = (first + (one.rollouts.group_ids == group).nonzero()[:, 0]).tolist()
            if one is grown:
                rows_of[slot] = rows_of[slot] + own
            else:
                rows_of[slot] = own
                is_filled[slot] = not refills or bool(has_spread[group])
        first += len(one.rollouts)
    rollouts, scores = rounds[0].rollouts, rounds[0].scores
    if len(every_round) > 1:
        rollouts = Rollouts.cat([one.rollouts for one in every_round])
        scores = Scores.cat([one.scores for one in every_round])
    if grown is not None:
        scores = rescore_whole_groups(scores, rollouts.group_ids, weights)
    rows = [row for own in rows_of.values() for row in own]
    filled = torch.tensor([is_filled[slot] for slot, own in rows_of.items() for _ in own])
    return Sampled(rollouts, scores, rows, filled, rounds, grown)


def _slots_without_spread(count: int, latest: Round | None) -> list[int]:
    """Return the slots of all ranks whose group has equal rewards in the latest round; a
    collective."""
    is_empty = torch.zeros(count)
    if latest is not None:
        is_empty[torch.tensor(latest.slots)] = (latest.reward_std() == 0).float()
    with dist.phase("dynamic sampling"):
        return dist.all_sum(is_empty).nonzero()[:, 0].tolist()


def _requests(run: Run, slots: Sequence[int], size: int) -> dict[int, Request]:
    """Take the next prompt for each slot, and return this rank's. One that cannot be sampled from
    is replaced by the next."""
    requests: dict[int, Request] = {}
    problem: str | None = None
    for slot in slots:
        for _ in range(MAX_UNUSABLE):
            prompt = run.source.take(1)[0]
            problem = run.policy.check_prompt(prompt, run.sampling)
            if problem is None:
                break
            log.warning("left out: %s", problem)
        else:
            raise DataError(f"{MAX_UNUSABLE} prompts in a row cannot be used; the last: {problem}")
        if slot % dist.world_size() == dist.rank():
            requests[slot] = Request(prompt, size)
    return requests


def _round(run: Run, step_params: StepParams, requests: dict[int, Request]) -> Round | None:
    """Sample and score this rank's requests, if any."""
    if not requests:
        return None
    with dist.phase("sample"):
        rollouts = run.engine.generate(
            list(requests.values()), step_params.sampling, seed=run.config.seed
        )
    is_joined = run.config.rollout.refill_rounds or run.config.rollout.first_samples
    if is_joined and len(rollouts.prompts) < len(requests):
        raise DataError("""two prompts of a step have the same id and draw, so their samples are one
            group; refilled or grown groups need to be told apart. Let the data source number its
            draws: Prompt(..., draw=n).""")
    with dist.phase("reward"), run.recorder.time("reward"):
        scores = run.rewards.score(rollouts, run.trainer_state)
    return Round(rollouts, scores, list(requests))


def _stop_if_useless(run: Run, rollouts: Rollouts, scores: Scores) -> None:
    """Warn of rows that failed; end the run if no row has been scored for too long, with the
    reason."""
    state = run.state
    is_scored = dist.all_max(int(scores.rewards.isfinite().any()))
    state.unscored_steps = 0 if is_scored else state.unscored_steps + 1
    is_hopeless = state.unscored_steps >= (MAX_UNSCORED_STEPS if state.step else 1)
    failures = environment_failures(rollouts)
    reasons = [f"the environment gave no reply: {reason}" for reason in failures.values()]
    reasons = reasons or [f"{f.reward}: {f.kind}: {f.message}" for f in scores.failures]
    for reason in reasons[:3]:
        log.warning("step %d: %s", state.step, reason)
    usable = sum(finish != "error" for finish in rollouts.finish) + len(failures)
    if state.unscored_steps and not dist.all_max(usable):
        raise NumericalStop(
            f"""step {state.step}: every rollout ended in logits that are not finite; the weights
                are not usable""",
            advice="Train again with a lower $optim.lr, or with another $model",
        )
    if is_hopeless:
        in_a_row = f", {state.unscored_steps} steps in a row" if state.step else ""
        first = reasons[0] if reasons else "every reward was None"
        raise DataError(f"""step {state.step}: the reward scored none of {len(rollouts)}
            completions{in_a_row}: {first}. Fix the reward function or the environment, then start
            or resume the run.""")


# --- growth ---------------------------------------------------------------------------------------


def max_group_size(rollout: RolloutConfig, group_size: int) -> int:
    """The largest size of a group in a step whose groups have ``group_size`` samples on average at
    most."""
    return 2 * group_size if rollout.first_samples else group_size


def further_requests(
    rounds: Sequence[Round], rollout: RolloutConfig, group_size: int, *, sampled: int
) -> dict[int, Request]:
    """Return what this rank samples beyond the rounds so far, by slot; all ranks agree on the
    shares.

    ``sampled``: rows of all ranks so far, those that refilling has discarded included: they too are
    of the budget.
    """
    reward_std = torch.zeros(rollout.prompts, dtype=torch.float64)
    prompts: dict[int, Prompt] = {}
    for one in rounds:  # a later round's group replaces the slot's earlier one
        reward_std[torch.tensor(one.slots)] = one.reward_std()
        prompts |= dict(zip(one.slots, one.rollouts.prompts, strict=True))
    first = rollout.first_samples
    more = allocate_samples(
        dist.all_sum(reward_std),
        torch.full((rollout.prompts,), first),
        budget=max(rollout.prompts * group_size - sampled, 0),
        cap=max_group_size(rollout, group_size),
    ).tolist()
    return {
        slot: Request(prompt, more[slot], first=first)
        for slot, prompt in prompts.items()
        if more[slot]
    }


def rescore_whole_groups(scores: Scores, group_ids: Tensor, weights: Sequence[float]) -> Scores:
    """Return the scores of groups that were scored in two calls, as if in one: a row is unscored if
    it lacks a part.

    A part applies to a group if it scores any of its rows. A call that saw only some of them may
    have found that it does not, and have left it out of their sum.
    """
    parts = zip(scores.parts.values(), weights, strict=True)
    counted = [part.isfinite() for part, weight in parts if weight != 0]
    if not counted:
        return scores
    scored = torch.stack(counted)  # [parts, B]
    is_missing = (applies_to_group(scored, group_ids) & ~scored).any(dim=0)
    return replace(scores, rewards=scores.rewards.where(~is_missing, torch.nan))
