"""Shared by the image modalities: the base of their policies, checks of images, and requests split
into batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest, learns_from_samples, values_of
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.common.validation import (
    check_trust_region,
    refuse,
    refuse_unused_options,
)
from gruppo.protocols import (
    DemonstrationMixin,
    ImageDescriptionMixin,
    MemoryMixin,
    Modality,
    Policy,
    PromptMixin,
    PromptSource,
    RecomputeMixin,
    peek,
)
from gruppo.types import DataError, Finish, GruppoError, Prompt, Request, Rollouts


class ImagePolicy(
    Policy,
    DemonstrationMixin,
    RecomputeMixin,
    PromptMixin,
    ImageDescriptionMixin,
    MemoryMixin,
):
    """Base class of policies with Gaussian actions and images as completions."""

    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian"})
    batch_rows: ClassVar[int]
    """Rows that are sampled together."""

    def check_sampling(self, sampling: Any) -> Any:
        """Raise GruppoError for options that do not apply to a normal distribution."""
        if sampling.temperature not in (0, 1):
            raise GruppoError(
                f"temperature={sampling.temperature:g}: images are sampled at 1, or at 0 the mean",
                advice="Set 1; $diffusion.eta and std=0.1 of $restoration.action set the noise",
            )
        if sampling.top_k or sampling.top_p != 1 or sampling.stop:
            raise GruppoError(f"""top_k={sampling.top_k}, top_p={sampling.top_p:g} and
                stop={sampling.stop!r} apply to tokens, and images have none. Leave them out.""")
        return sampling

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Float[Tensor, "P ..."]:
        """Return what the network reads of each prompt."""
        raise NotImplementedError

    def sample_batch(self, batch: RowBatch, sampling: Any, seed: int) -> Rollouts:
        """Sample the rows of a batch."""
        raise NotImplementedError

    def action_dims(self, prompt: Prompt) -> int:
        """Return the number of dimensions of one action."""
        raise NotImplementedError

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """Sample ``request.size`` images of each prompt; noise is addressed by (seed, draw, sample,
        step)."""
        sampling = self.check_sampling(sampling)
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        prompts = [request.prompt for request in requests]
        refuse(*(self.check_prompt(prompt, sampling) for prompt in prompts))
        self.module.eval()  # dropout would make sampling and scoring two functions
        batches = row_batches(requests, self.encode_prompts(prompts), self.batch_rows)
        return Rollouts.cat([self.sample_batch(batch, sampling, seed) for batch in batches])


class ImageModality(Modality):
    """Base class of modalities whose policies are image policies."""

    rewards_read_images = is_gaussian = True
    has_lengths = False
    settings_file: ClassVar[str]
    """File that marks the folder of a saved policy."""

    has_consistency: ClassVar[bool] = False
    """Whether images have a consistency term."""

    def matches(self, model: str) -> bool:
        return bool(model) and (Path(model_of(model)) / self.settings_file).is_file()

    def validate(self, config: Config) -> None:
        refuse_unused_options(config, self, has_consistency=self.has_consistency)
        if highest(config, "entropy_coef"):
            raise GruppoError(
                """a stage's entropy_coef is above 0, and the entropy of an image's actions is
                    fixed by their std""",
                option="stage.entropy_coef",
                advice="0; $diffusion.eta and std=0.1 of $restoration.action set the noise",
            )
        if config.model != IN_MEMORY and config.compute == "bfloat16" and not config.lora.rank:
            raise GruppoError(
                f"""compute='bfloat16' holds the base below adapters, and the weights of
                    {config.model!r} are trained themselves""",
                option="compute",
                advice="float32, or $lora.rank with a pipeline of diffusers",
            )

    def check(
        self, config: Config, policy: Any, sampling: Any, data: PromptSource, rewards: Any
    ) -> None:
        policy.check_sampling(sampling.greedy())
        for temperature in {sampling.temperature, *values_of(config, "temperature")}:
            policy.check_sampling(replace(sampling, temperature=temperature))
        first = peek(data)
        errors = [policy.check_prompt(prompt, sampling) for prompt in first]
        if all(errors):
            raise DataError(f"""none of the first {len(first)} prompts of {config.data!r} can be
                used: {errors[0]}""")
        if learns_from_samples(config):
            usable = first[errors.index(None)]
            check_trust_region(config.objective, policy.action_dims(usable))


def image_error(
    image: Any, role: str, channels: int, size: tuple[int, ...] | None = None
) -> str | None:
    """Return why an object is not an image [C, H, W] of floats in [0, 1], with what to do; None if
    it is one.

    ``role``: "input" or "target", for the message. ``size``: the required height and width; any by
    default.
    """
    shape = f"[{channels}, {', '.join(map(str, size or 'HW'))}]"
    needed = f"as its {role}; it needs floats {shape} in [0, 1]. Convert, resize or crop it."
    if not isinstance(image, Tensor):
        return f"has a {type(image).__name__} {needed}"
    fits = image.ndim == 3 and len(image) == channels and size in (None, tuple(image.shape[1:]))
    if not fits or not image.is_floating_point():
        return f"has {list(image.shape)} of {image.dtype} {needed}"
    low, high = (float(bound) for bound in torch.aminmax(image))
    if not (low >= 0 and high <= 1):  # also true of NaN
        return f"has values from {low:g} to {high:g} {needed}"
    return None


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows that are sampled together."""

    prompts: tuple[Prompt, ...]
    inputs: Tensor
    """Encoded prompts [P, ...]."""
    group_ids: Int[Tensor, "B"]
    """Index into ``prompts`` of each row."""
    addresses: list[tuple[int, int]]
    """Draw and sample index of each row: with the seed, all that its noise depends on."""


def row_batches(requests: Sequence[Request], inputs: Tensor, batch_rows: int) -> Iterator[RowBatch]:
    """Split requests into batches of at most ``batch_rows`` rows, in their order.

    Raises GruppoError if two prompts of one id and draw have different inputs: their rows would
    become one group.
    """
    known: dict[tuple[str, int], Tensor] = {}
    for request, own in zip(requests, inputs, strict=True):
        prompt = request.prompt
        if not torch.equal(known.setdefault((prompt.id, prompt.draw), own), own):
            raise GruppoError(f"""two different prompts have the id {prompt.id!r} and the draw
                {prompt.draw}; their rows would become one group. Give each prompt its own id or
                draw.""")
    owners = torch.tensor([p for p, request in enumerate(requests) for _ in range(request.size)])
    samples = [request.first + n for request in requests for n in range(request.size)]
    for start in range(0, len(owners), batch_rows):
        rows = slice(start, start + batch_rows)
        selected, group_ids = owners[rows].unique(return_inverse=True)
        prompts = tuple(requests[p].prompt for p in selected.tolist())
        draws = [prompts[p].draw for p in group_ids.tolist()]
        addresses = list(zip(draws, samples[rows], strict=True))
        yield RowBatch(prompts, inputs[selected], group_ids, addresses)


def image_rollouts(
    prompts: Sequence[Prompt],
    actions: Float[Tensor, "B T ..."],
    completions: Iterable[Tensor],
    *,
    shared: dict[str, Any],
    per_row: dict[str, Tensor],
    group_ids: Int[Tensor, "B"] | None = None,
    logprobs: Float[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    is_finite: Bool[Tensor, "B"] | None = None,
    temperature: float = 1.0,
) -> Rollouts:
    """Rollouts whose rows have T actions each; by default demonstrations: one row per prompt, with
    log-probs of 0."""
    rows, columns = actions.shape[:2]
    finite = [True] * rows if is_finite is None else is_finite.tolist()
    finish: list[Finish] = ["stop" if one else "error" for one in finite]
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=torch.arange(rows) if group_ids is None else group_ids,
        actions=actions,
        mask=torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask,
        lengths=torch.full((rows,), columns),
        completions=tuple(completions),
        sampler_logprobs=torch.zeros(rows, columns) if logprobs is None else logprobs,
        policy_version=torch.zeros(rows, columns, dtype=torch.long),
        temperature=torch.full((rows,), temperature),
        finish=tuple(finish),
        shared=shared,
        per_row=per_row,
    )
