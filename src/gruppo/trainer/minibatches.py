"""How a batch is cut: into minibatches, and of those the rows that need a forward; and what is asked of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo import distributed as dist
from gruppo.protocols import Outputs, check_values
from gruppo.seeds import generator_at
from gruppo.trainer.demonstrations import demo_parts
from gruppo.trainer.memory import in_micro_batches
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, Gaussian, Likelihood, MicroBatch, Rollouts


def minibatches(run: Run, batch: Batch, step_params: StepParams) -> Iterator[Batch]:
    """The batch cut into ``minibatches`` parts, in a new order each epoch."""
    for epoch in range(run.config.optim.epochs):
        demos = demo_parts(run, batch.demos, epoch)
        if batch.rollouts is None:
            yield from (replace(batch, demos=part) for part in demos if part is not None)
            continue
        for rows, part in zip(minibatch_rows(run, batch.rollouts, epoch), demos, strict=True):
            yield replace(_part(batch, rows), demos=part)


def minibatch_rows(run: Run, rollouts: Rollouts, epoch: int) -> Iterator[Int[Tensor, "b"]]:
    """This rank's rows of each minibatch of an epoch.

    The cut is made over the rows of all ranks, numbered as one rank would hold them, so that the number of ranks
    changes no minibatch. A rank may have no row in one.
    """
    if run.config.optim.minibatches == 1:
        yield torch.arange(len(rollouts))
        return
    own, total = numbered(rollouts, run.config.rollout.prompts)
    generator = generator_at(run.config.seed, "minibatches", run.state.step, epoch)
    for part in torch.randperm(total, generator=generator).tensor_split(run.config.optim.minibatches):
        yield torch.isin(own, part).nonzero()[:, 0]


def numbered(rollouts: Rollouts, slots: int) -> tuple[Int[Tensor, "B"], int]:
    """The numbers of this rank's rows among those of all ranks, and how many there are in all.

    The rows of a slot's group follow each other, slots in order, of which a rank has every ``world``-th.
    """
    sizes = rollouts.group_ids.unique_consecutive(return_counts=True)[1]
    held = torch.arange(len(sizes)) * dist.world_size() + dist.rank()
    of_slots = torch.zeros(slots, dtype=torch.long)
    of_slots[held] = sizes
    of_slots = dist.all_sum(of_slots)
    first = (of_slots.cumsum(0) - of_slots)[held]  # number of each group's first row
    within = torch.arange(len(rollouts)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return first.repeat_interleave(sizes) + within, int(of_slots.sum())


def _part(batch: Batch, rows: Int[Tensor, "b"]) -> Batch:
    return batch if len(rows) == len(batch.rewards) else batch.take(rows)


def has_gradient(run: Run, batch: Batch, step_params: StepParams) -> Bool[Tensor, "B T"]:
    """Kept actions of rows that can move the weights: those without an advantage cannot, where nothing else pulls.

    They stay in the weights' denominator, so that leaving out their forward changes no gradient. A minibatch without
    any such row takes no optimiser step at all: AdamW's momentum and weight decay, which a gradient of zero would let
    go on, rest as well. Where advantages are made from log-probs or values, all rows were evaluated for that; the same
    micro-batches then serve the update, whose first ratio would not be 1 otherwise.
    """
    if step_params.kl_coef or step_params.cons_coef or step_params.entropy_coef or run.critic is not None:
        return batch.loss_mask
    return batch.loss_mask & (batch.advantages != 0).any(dim=1, keepdim=True)


def wanted(run: Run, step_params: StepParams, *, with_stats: bool = True) -> Outputs:
    """What a forward gives beside log-probs; ``with_stats``, the entropy also where nothing but a metric needs it.

    The entropy with a gradient is asked for before the updates too: the log-probs beside it round otherwise than those
    of the faster way, and the first ratio would not be 1. The entropy as a number changes no bit of them.
    """
    said: Outputs = ("entropy",) if step_params.entropy_coef else ("entropy_value",) if with_stats else ()
    said = (*said, *gaussian(run), *(("output",) if step_params.cons_coef else ()))
    return (*said, "values") if run.critic is not None and run.critic.is_shared else said


def gaussian(run: Run) -> Outputs:
    """What is asked of a policy whose KLs have a closed form; nothing where none is measured."""
    is_measured = run.reference is not None or run.config.updates_per_batch > 1
    return ("gaussian",) if "gaussian" in run.policy.likelihood_outputs and is_measured else ()


def likelihood_of(run: Run, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs) -> Likelihood:
    """The policy's likelihood; its values are one of each action."""
    likelihood = run.policy.likelihood(rollouts, micro_batch, outputs=outputs)
    if "values" in outputs:
        assert likelihood.values is not None
        check_values(likelihood.values, micro_batch)
    return likelihood


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """No gradient reaches the weights through a forward that is made within."""
    resting = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in resting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in resting:
            parameter.requires_grad_(True)


@torch.no_grad()
def evaluated(run: Run, batch: Batch, step_params: StepParams) -> Batch:
    """The batch with what policy, reference and critic say of it before any update, as far as it is needed then.

    They come from the very micro-batches that the first epoch's updates use: in bfloat16 another cut rounds otherwise,
    and the first ratio would not be 1 (after memory has run out in an update, it is not). Rows without a gradient have
    none, and are asked for none. Numbers are kept in the precision that they come in, from float32 on: the joint
    log-prob of many dimensions is in the thousands.
    """
    needed, stored = _needed(run, step_params), dict[str, Tensor]()
    with (
        dist.fail_together(),
        run.reference.on_device() if "ref" in needed and run.reference is not None else nullcontext(),
    ):
        assert batch.rollouts is not None
        for rows in minibatch_rows(run, batch.rollouts, epoch=0):
            part = _part(batch, rows)
            assert part.rollouts is not None
            ask = partial(_said_of, run, step_params, part.rollouts)
            for micro_batch, said in in_micro_batches(run, part.rollouts, has_gradient(run, part, step_params), ask):
                place = (
                    rows[micro_batch.rows][:, None],
                    torch.arange(micro_batch.cols.start or 0, micro_batch.cols.stop)[None],
                )
                for name, numbers in said.items():
                    _store(stored, name, numbers, place, batch.loss_mask.shape)
    stored = {name: torch.zeros(batch.loss_mask.shape) for name in needed} | stored
    old, ref, values = map(stored.get, ("old_logprobs", "ref", "old_values"))
    return replace(
        batch,
        old_logprobs=old,
        old_gaussian=_stored_gaussian(stored, "old_logprobs"),
        ref=None if ref is None else Likelihood(ref, gaussian=_stored_gaussian(stored, "ref")),
        old_values=values,
    )


def _store(
    stored: dict[str, Tensor], name: str, numbers: Tensor, place: tuple[Tensor, Tensor], shape: Sequence[int]
) -> None:
    """A micro-batch's numbers [b, t, ...] in those of the batch, which are 0 elsewhere; a std is 1."""
    numbers = numbers.detach().to(torch.promote_types(numbers.dtype, torch.float32)).cpu()
    if name not in stored:
        filling = 1.0 if name.endswith(":std") else 0.0
        stored[name] = torch.full((*shape, *numbers.shape[2:]), filling, dtype=numbers.dtype)
    stored[name][place] = numbers


def _stored_gaussian(stored: Mapping[str, Tensor], name: str) -> Gaussian | None:
    if f"{name}:mean" not in stored:
        return None
    return Gaussian(stored[f"{name}:mean"], stored[f"{name}:std"])


def asks_before_updates(run: Run) -> bool:
    """Whether an update needs what was said before it, be there a critic or not."""
    return run.config.updates_per_batch > 1 or (run.reference is not None and run.reference.is_offloaded)


def has_kl_in_reward(run: Run, step_params: StepParams) -> bool:
    return run.config.objective.kl_in == "reward" and step_params.kl_coef > 0


def _needed(run: Run, step_params: StepParams) -> list[str]:
    """Log-probs where advantages are made of them or several updates share them; else the update's own are the old.

    The reference's beside them, and where its weights rest elsewhere than where an update computes.
    """
    names = ["old_logprobs"] if has_kl_in_reward(run, step_params) or run.config.updates_per_batch > 1 else []
    names += ["ref"] if run.reference is not None and (names or run.reference.is_offloaded) else []
    return names + (["old_values"] if run.critic is not None else [])


def _said_of(
    run: Run, step_params: StepParams, rollouts: Rollouts, micro_batches: list[MicroBatch]
) -> list[tuple[MicroBatch, dict[str, Tensor]]]:
    return [(micro_batch, _said(run, rollouts, micro_batch, step_params)) for micro_batch in micro_batches]


def _said(
    run: Run, rollouts: Rollouts, micro_batch: MicroBatch, step_params: StepParams
) -> dict[str, Float[Tensor, "b t"]]:
    """What is needed of one micro-batch; a shared critic's values come from the policy's forward, if there is one."""
    said: dict[str, Tensor] = {}
    needed = _needed(run, step_params)
    if "old_logprobs" in needed:
        likelihood = likelihood_of(run, rollouts, micro_batch, outputs=wanted(run, step_params, with_stats=False))
        said |= _with_gaussian("old_logprobs", likelihood)
        if likelihood.values is not None:
            said["old_values"] = likelihood.values
    if "ref" in needed and run.reference is not None:
        said |= _with_gaussian("ref", run.reference.likelihood(rollouts, micro_batch, outputs=gaussian(run)))
    if run.critic is not None and "old_values" not in said:
        said["old_values"] = run.critic.values(rollouts, micro_batch)
    return said


def _with_gaussian(name: str, likelihood: Likelihood) -> dict[str, Tensor]:
    """Log-probs under this name, and the normal that they are of."""
    own = likelihood.gaussian
    beside = {} if own is None else {f"{name}:mean": own.mean, f"{name}:std": own.std}
    return {name: likelihood.logprobs, **beside}
