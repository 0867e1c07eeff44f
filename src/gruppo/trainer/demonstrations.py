"""Demonstrations: their source, what each answers, and their part of an update."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from string import Formatter
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.config.schema import Config, SupervisedConfig
from gruppo.config.stages import highest
from gruppo.data.open import is_custom_source, open_source
from gruppo.environments import Environment
from gruppo.environments.conversation import reset_prompt
from gruppo.loading import did_you_mean
from gruppo.protocols import DemonstrationMixin, PromptSource, part, peek
from gruppo.seeds import generator_at, seed_at
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import DataError, GruppoError, Prompt, Rollouts

log = logging.getLogger("gruppo")

ATTEMPTS = 100
"""Consecutive prompts that cannot be learned from, which end the run."""


class Answers:
    """What to answer a prompt with: a column, or a template of columns; the target by default."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.template = config.template
        self.names = [config.column or "target"]
        """The columns that are read."""
        if not self.template:
            return
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.template)]
        except ValueError:
            fields = [""]
        self.names = [name for name in fields if name is not None]
        if "" in self.names:
            raise GruppoError(f"""supervised.template={self.template!r} is not understood; columns
                stand in braces, as in '<answer>{{answer}}</answer>', and a brace of the text is
                written twice.""")

    def given(self, prompt: Prompt) -> Prompt:
        """Return the prompt with what to answer as its target; None if a column that is needed is
        empty.

        ``target``, and ``answer`` if no column is called that, are the prompt's target.
        """
        columns = {"answer": prompt.target, **prompt.meta, "target": prompt.target}
        values = {name: columns.get(name) for name in self.names}
        if not self.template:
            return replace(prompt, target=values[self.names[0]])
        if any(value is None or value == "" or value != value for value in values.values()):  # NaN
            return replace(prompt, target=None)
        try:
            if not all(isinstance(value, str | int | float) for value in values.values()):
                raise TypeError("it needs strings and numbers")
            return replace(prompt, target=self.template.format_map(values))
        except (ValueError, TypeError) as error:
            raise GruppoError(
                f"supervised.template={self.template!r} does not fit {values!r:.80}: {error}."
            ) from None


def open_demos(config: Config, data: Any) -> PromptSource | None:
    """Return a stream of demonstrations, apart from the one of the rollouts' prompts; None if no
    stage learns from them.

    ``data``: what the run's prompts come from, in which held-out prompts stay held out.
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
    prompts = peek(source)
    columns = set(source.columns or ()).union(*(prompt.meta for prompt in prompts))
    if any(prompt.target is not None for prompt in prompts):
        columns |= {"target", "answer"}
    missing = [name for name in Answers(config).names if name not in columns]
    if not missing:
        return
    data, listed = config.data or "the data", ", ".join(map(repr, sorted(columns)))
    option = "template" if config.template else "column"
    if missing == ["target"]:
        raise GruppoError(
            f"{data} have no target to learn from; their columns are {listed}",
            option=f"supervised.{option}",
            advice="to what is to be answered, or $supervised.data",
        )
    raise GruppoError(
        f"supervised.{option} names {missing[0]!r}, which is none of {data}'s columns, {listed}",
        advice=f"Set $supervised.{option}.{did_you_mean(missing[0], sorted(columns))}",
    )


def prepared(
    prompts: list[Prompt], config: Config, policy: Any, environment: Environment | None
) -> Iterator[tuple[Prompt, str | None]]:
    """Yield each demonstration's prompt with its target, and why it cannot be learned from, if it
    cannot.

    Prompts of the run's data begin as in its conversations, with what ``reset`` of an environment
    class adds; those of ``supervised.data`` are whole.
    """
    answers = Answers(config.supervised)
    for prompt in prompts:
        if environment is not None and not config.supervised.data:
            try:
                prompt = reset_prompt(environment, prompt, config.seed)
            except DataError as error:
                yield prompt, str(error)
                continue
        # None as its target if a column is empty: the policy says that it cannot learn from that
        prompt = answers.given(prompt)
        yield prompt, policy.check_demonstration(prompt)


def check_demos(
    config: Config, source: PromptSource, policy: Any, environment: Environment | None
) -> None:
    """Refuse data whose first prompts all have nothing to learn from."""
    problems = [problem for _, problem in prepared(peek(source), config, policy, environment)]
    if all(problems):
        raise DataError(
            f"none of the first {len(problems)} demonstrations can be learned from: {problems[0]}"
        )


def take_demonstrations(run: Run) -> tuple[list[Prompt], int]:
    """Return this rank's prompts of the step, each with what to answer, and how many all ranks
    skipped."""
    assert run.demos is not None
    prompts: list[Prompt] = []
    skipped = in_a_row = 0
    while len(prompts) < run.config.supervised.batch:
        drawn = run.demos.take(1)
        prompt, problem = next(prepared(drawn, run.config, run.policy, run.environment))
        if problem is None:
            prompts.append(prompt)
            in_a_row = 0
            continue
        skipped += 1
        in_a_row += 1
        reason = problem
        if in_a_row == ATTEMPTS:
            raise DataError(
                f"{ATTEMPTS} demonstrations in a row cannot be learned from; the last: {reason}"
            )
    if skipped:
        log.warning(
            "step %d: %d demonstrations were skipped; the last: %s", run.state.step, skipped, reason
        )
    return prompts[dist.rank() :: dist.world_size()], skipped


def demonstrations(run: Run, step_params: StepParams) -> Rollouts | None:
    """Return this rank's demonstrations of the step; none in a critic's warmup."""
    if not step_params.sup_coef or step_params.is_critic_alone:
        return None
    with run.recorder.time("demos"):
        prompts, skipped = take_demonstrations(run)
        demos = part(run.policy, DemonstrationMixin).demonstrations(prompts, seed=run.config.seed)
    run.recorder.metrics["sup/skipped_count"] = float(skipped)
    return demos


def demo_parts(run: Run, demos: Rollouts | None, epoch: int) -> list[Rollouts | None]:
    """Return this rank's demonstrations of each minibatch of an epoch, which may be no row; None
    without any.

    The cut is made over the demonstrations of all ranks, so that the number of ranks changes no
    minibatch.
    """
    count = run.config.optim.minibatches
    if demos is None or count == 1:
        return [demos] * count
    slots = torch.arange(len(demos)) * dist.world_size() + dist.rank()
    generator = generator_at(run.config.seed, "demonstrations", run.state.step, epoch)
    order = torch.randperm(run.config.supervised.batch, generator=generator)
    return [demos.take(torch.isin(slots, own).nonzero()[:, 0]) for own in order.tensor_split(count)]
