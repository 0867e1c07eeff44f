"""Demonstrations: their source, what each answers, their part of an update, and the supervised
loss."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import replace
from string import Formatter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import Config, SupervisedConfig
from gruppo.config.stages import highest
from gruppo.data.open import is_custom_source, open_source
from gruppo.distributed.sharding import forward
from gruppo.environments import Environment
from gruppo.environments.conversation import reset_prompt
from gruppo.loading import did_you_mean
from gruppo.protocols import DemonstrationMixin, PromptSource, RestorationMixin, part, peek
from gruppo.seeds import generator_at, seed_at
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import (
    DataError,
    GruppoError,
    Likelihood,
    MicroBatch,
    Prompt,
    Rollouts,
    Stat,
)

log = logging.getLogger("gruppo")

ATTEMPTS = 100
"""Consecutive prompts that cannot be learned from, which end the run."""


# --- what to answer -------------------------------------------------------------------------------


class Answers:
    """What to answer a prompt with: a column, or a template of columns; the target by default."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.template = config.template
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.template)]
        except ValueError:
            fields = [""]
        names = [name for name in fields if name is not None]
        if "" in names:
            raise GruppoError(f"""supervised.template={self.template!r} is not understood; columns
                stand in braces, as in '<answer>{{answer}}</answer>', and a brace of the text is
                written twice.""")
        self.names = names if self.template else [config.column or "target"]
        """The columns that are read."""

    def given(self, prompt: Prompt) -> Prompt:
        """Return the prompt with what to answer as its target; None if a column that is needed is
        empty.

        ``target``, and ``answer`` if no column is called that, are the prompt's target.
        """
        own = {"answer": prompt.target, **prompt.meta, "target": prompt.target}
        values = {name: own.get(name) for name in self.names}
        if not self.template:
            return replace(prompt, target=values[self.names[0]])
        for name, value in values.items():
            if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
                return replace(prompt, target=None)
            if not isinstance(value, str | int | float):
                raise GruppoError(
                    f"""supervised.template={self.template!r} stands around texts and numbers, and
                        the column {name!r} holds {value!r:.80}""",
                    option="supervised.column",
                    advice=f"{name} in its place",
                )
        try:
            return replace(prompt, target=self.template.format_map(values))
        except (ValueError, TypeError) as error:
            raise GruppoError(
                f"supervised.template={self.template!r} does not fit {values!r:.80}: {error}."
            ) from None


# --- where they come from -------------------------------------------------------------------------


def open_demos(config: Config, data: Any) -> PromptSource | None:
    """A stream of its own over the demonstrations, so that the prompts of the rollouts stay what
    they were.

    ``data``: what the run's prompts come from, in which held-out prompts stay held out. None where
    no stage learns from demonstrations. Columns that are not there are refused.
    """
    if not highest(config, "sup_coef"):
        return None
    if config.supervised.batch < dist.world_size():
        raise GruppoError(
            f"""supervised.batch={config.supervised.batch} leaves some of the {dist.world_size()}
                    ranks without a demonstration""",
            option="supervised.batch",
            advice=f"{dist.world_size()} or more, or start fewer ranks",
        )
    own = not config.supervised.data  # from the run's data
    if own and is_custom_source(data):
        raise GruppoError(
            """the data are an object with a stream of its own, which demonstrations cannot be drawn
                    from as well""",
            advice="Set $supervised.data",
        )
    source: Any = open_source(
        data if own else config.supervised.data,
        seed=seed_at(config.seed, "demonstrations"),
        prompt_column=config.prompts.column,
        target_column=config.prompts.target_column if own else None,
        held_out_fraction=config.prompts.held_out_fraction,
    )
    _check_columns(config.supervised, source)
    return source


def _check_columns(config: SupervisedConfig, source: PromptSource) -> None:
    """Refuse data without the columns that the answers are made of."""
    first, answers = peek(source), Answers(config)
    columns = set(source.columns or ()).union(*(prompt.meta for prompt in first))
    if any(prompt.target is not None for prompt in first):
        columns |= {"target", "answer"}
    missing = [name for name in answers.names if name not in columns]
    if not missing:
        return
    data, listed = config.data or "the data", ", ".join(map(repr, sorted(columns)))
    if answers.names == ["target"]:
        raise GruppoError(
            f"{data} have no target to learn from; their columns are {listed}",
            option="supervised.column",
            advice="to what is to be answered, or $supervised.data",
        )
    where = "template" if config.template else "column"
    raise GruppoError(
        f"supervised.{where} names {missing[0]!r}, which is none of {data}'s columns, {listed}",
        advice=f"Set $supervised.{where}.{did_you_mean(missing[0], sorted(columns))}",
    )


def prepared(
    prompt: Prompt, answers: Answers, config: Config, policy: Any, environment: Environment | None
) -> tuple[Prompt, str | None]:
    """The prompt of a demonstration with its target, and why it cannot be learned from, if it
    cannot.

    Prompts of the run's data begin as in its conversations, with what ``reset`` of an environment
    class adds; those of ``supervised.data`` are whole.
    """
    if environment is not None and not config.supervised.data:
        try:
            prompt = reset_prompt(environment, prompt, config.seed)
        except DataError as error:
            return prompt, str(error)
    prompt = answers.given(
        prompt
    )  # None as its target where a column is empty: the policy says that it cannot learn
    return prompt, policy.check_demonstration(prompt)


def check_demos(
    config: Config, source: PromptSource, policy: Any, environment: Environment | None
) -> None:
    """Refuse data whose first prompts all have nothing to learn from."""
    answers = Answers(config.supervised)
    problems = [
        prepared(prompt, answers, config, policy, environment)[1] for prompt in peek(source)
    ]
    if all(problems):
        raise DataError(
            f"none of the first {len(problems)} demonstrations can be learned from: {problems[0]}"
        )


def take_demonstrations(run: Run) -> tuple[list[Prompt], int]:
    """Return this rank's prompts of the step, each with what to answer, and how many all ranks
    skipped."""
    assert run.demos is not None
    config, answers = run.config, Answers(run.config.supervised)
    prompts: list[Prompt] = []
    skipped = 0
    reason: str | None = ""
    for slot in range(config.supervised.batch):
        for _ in range(ATTEMPTS):
            drawn = run.demos.take(1)[0]
            prompt, problem = prepared(drawn, answers, config, run.policy, run.environment)
            if problem is None:
                break
            skipped += 1
            reason = problem
        else:
            raise DataError(
                f"{ATTEMPTS} demonstrations in a row cannot be learned from; the last: {reason}"
            )
        if slot % dist.world_size() == dist.rank():
            prompts.append(prompt)
    if skipped:
        log.warning(
            "step %d: %d demonstrations were skipped; the last: %s", run.state.step, skipped, reason
        )
    return prompts, skipped


def demonstrations(run: Run, step_params: StepParams) -> Rollouts | None:
    """Return this rank's demonstrations of the step; none in a critic's warmup."""
    if not step_params.sup_coef or step_params.is_critic_alone:
        return None
    with run.recorder.time("demos"):
        prompts, skipped = take_demonstrations(run)
        demos = part(run.policy, DemonstrationMixin).demonstrations(prompts, seed=run.config.seed)
    run.recorder.metrics["sup/skipped_count"] = float(skipped)
    run.example = run.example or prompts[0]
    return demos


# --- how they are learned from --------------------------------------------------------------------


def demo_parts(run: Run, demos: Rollouts | None, epoch: int) -> list[Rollouts | None]:
    """This rank's demonstrations of each minibatch of an epoch, which may be no row; None where
    there are none at all.

    The cut is made over the demonstrations of all ranks, so that the number of ranks changes no
    minibatch.
    """
    count = run.config.optim.minibatches
    if demos is None or count == 1:
        return [demos] * count
    slots = torch.arange(len(demos)) * dist.world_size() + dist.rank()
    generator = generator_at(run.config.seed, "demonstrations", run.state.step, epoch)
    order = torch.randperm(run.config.supervised.batch, generator=generator)
    return [
        demos.take(torch.isin(slots, part).nonzero()[:, 0]) for part in order.tensor_split(count)
    ]


def supervised_backward(
    run: Run,
    demos: Rollouts,
    step_params: StepParams,
    weights: Float[Tensor, "B T"],
    micro_batches: list[MicroBatch],
) -> dict[str, Stat]:
    """Accumulate gradients of the supervised term, and of the consistency if nothing is sampled; no
    collectives."""
    stats: dict[str, Stat] = defaultdict(Stat)
    policy = part(run.policy, DemonstrationMixin)
    for micro_batch in micro_batches:
        likelihood = forward(run.policy.module, run.policy.likelihood, demos, micro_batch)
        loss = policy.supervised_loss(demos.take(micro_batch.rows), likelihood)  # [b, t]
        chosen = micro_batch.of(demos.mask)
        loss_mask = chosen.to(loss.device, non_blocking=True)
        own_weights = micro_batch.of(weights)
        kept = torch.where(loss_mask, loss, 0)
        term = (own_weights.to(loss, non_blocking=True) * kept).sum()
        total = step_params.sup_coef * term
        if step_params.cons_coef:
            held = consistency_term(run, demos, micro_batch, own_weights, likelihood)
            total = total + step_params.cons_coef * held
            stats["loss/cons"] += Stat.of(held)
        # a repeat runs as many collectives as other ranks, and adds nothing
        (total * 0 if micro_batch.is_repeat else total).backward()
        if micro_batch.is_repeat:
            continue
        stats["loss/sup"] += Stat.of(term)
        stats["sup/nats"] += Stat.of(loss, loss_mask)
        stats["sup/tokens"] += Stat(1, float(chosen.sum()))
        stats["update/micro_batches"] += Stat(1, 1.0)
    return stats


def consistency_term(
    run: Run,
    rollouts: Rollouts,
    micro_batch: MicroBatch,
    weights: Float[Tensor, "b t"],
    likelihood: Likelihood,
) -> Float[Tensor, ""]:
    """Consistency loss, weighted and summed over the actions of a micro-batch; ``likelihood`` has
    its "output"."""
    ref = Likelihood(likelihood.logprobs.detach())
    if run.reference is not None and run.policy.modality.consistency_reads_reference(run.config):
        ref = run.reference.likelihood(rollouts, micro_batch, outputs=("output",))
    restorer, rows = part(run.policy, RestorationMixin), rollouts.take(micro_batch.rows)
    loss = forward(
        run.policy.module, restorer.consistency_loss, rows, likelihood, ref
    )  # [b, T]; may call the module again
    loss = loss[:, micro_batch.cols]  # [b, t]
    return (
        weights.to(loss) * torch.where(micro_batch.of(rollouts.mask).to(loss.device), loss, 0)
    ).sum()
