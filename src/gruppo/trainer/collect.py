"""Collect: prompts, samples, rewards, advantages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gruppo import distributed as dist
from gruppo.environments import environment_failures
from gruppo.rewards.scoring import Scores
from gruppo.trainer.advantages import Scored, assemble
from gruppo.trainer.demonstrations import demonstrations
from gruppo.trainer.dynamic_sampling import Round, Sampled, further_requests, join_rounds
from gruppo.trainer.forward import whole_weights
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import DataError, NumericalStop, Request, Rollouts, TrainBatch

log = logging.getLogger("gruppo")

MAX_UNSCORED_STEPS = 10
"""Consecutive steps without a scored row that end the run: it would learn nothing."""
MAX_UNUSABLE = 100
"""Consecutive prompts that cannot be sampled from, which end the run."""


@dataclass(frozen=True, eq=False)
class Collected:
    """The data of a step."""

    batch: TrainBatch
    sampled: Sampled | None
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
    demos = demonstrations(run, step_params)
    if not step_params.samples:
        nothing = torch.zeros(0, 0)
        empty = TrainBatch(
            rollouts=None,
            demos=demos,
            rewards=torch.zeros(0),
            loss_mask=nothing.bool(),
            advantages=nothing,
        )
        return Collected(empty, None)
    with run.recorder.time("rollout"), whole_weights(run.policy, engine=run.config.engine.kind):
        sampled = sample(run, step_params)
    _stop_if_useless(run, sampled.rollouts, sampled.scores)
    with run.recorder.time("credit"):
        batch = assemble(step_params, Scored(run, *sampled.batch()))
    return Collected(replace(batch, demos=demos), sampled)


def sample(run: Run, step_params: StepParams) -> Sampled:
    """Sample and score every slot's prompt; resample groups without spread, within the budget of
    rounds; and at last grow groups with spread."""
    config = run.config.rollout
    # where groups may grow, the first samples only
    size = config.first_samples or step_params.group_size
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
        grown = _round(
            run, step_params, further_requests(rounds, config, step_params, sampled=sampled)
        )
    return join_rounds(rounds, grown, run.rewards.weights, refills=config.refill_rounds > 0)


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
    if len(rollouts.prompts) < len(requests) and is_joined:
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
    for row, reason in list(failures.items())[:3]:
        log.warning("step %d row %d: the environment gave no reply: %s", state.step, row, reason)
    if is_hopeless and dist.all_max(len(failures)):
        first = f": {next(iter(failures.values()))}" if failures else ""
        raise DataError(f"""step {state.step}: the environment failed in {len(failures)} of
            {len(rollouts)} conversations and no other was scored{first}. Fix the environment, then
            start or resume the run.""")
    usable = sum(finish != "error" for finish in rollouts.finish) + len(failures)
    if state.unscored_steps and not dist.all_max(usable):
        raise NumericalStop(
            f"""step {state.step}: every rollout ended in logits that are not finite; the weights
                are not usable""",
            advice="Train again with a lower $optim.lr, or with another $model",
        )
    if is_hopeless:
        first = f": {scores.failures[0].message}" if scores.failures else " (every reward was None)"
        in_a_row = f", {state.unscored_steps} steps in a row" if state.step else ""
        raise DataError(f"""step {state.step}: the reward scored none of {len(rollouts)}
            completions{in_a_row}{first}. Fix the reward function, then
            start or resume the run.""")
    for failed in scores.failures[:3]:
        where = (state.step, failed.row, failed.reward)
        log.warning("step %d row %d: reward %s: %s: %s", *where, failed.kind, failed.message)
