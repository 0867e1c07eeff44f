"""Contracts: what a policy, modality, engine, reward, critic, reference, tracker and prompt source
provide.

These list every member that gruppo calls. An object that passes its public check
(``gruppo.check_policy``, ``gruppo.check_engine``, ``gruppo.check_reward``) trains, evaluates,
resumes and exports.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.errors import GruppoError
from gruppo.types import (
    Generated,
    Likelihood,
    MicroBatch,
    Prompt,
    Request,
    Rollouts,
    Sampling,
    Stat,
    TokenBatch,
)

T = TypeVar("T")

Outputs = Collection[str]
"""Requested outputs of a likelihood besides ``logprobs``: "entropy" (with gradient),
"entropy_value" (without, cheaper), "gaussian", "values", "output"."""

GenerateTokens = Callable[[TokenBatch, Any, int], Generated]
"""Samples the rows of a batch: (batch, sampling, seed)."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that a policy may call, as JSON schemas."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of a policy that share a learning rate factor and a gradient norm limit."""

    names: tuple[str, ...]
    """As in ``policy.module.named_parameters()``."""
    lr_factor: float = 1.0
    """Multiplies the learning rate of the step."""
    norm: str = "norm"
    """Groups with the same name are clipped together; logged as ``grad/<norm>``."""


class Policy:
    """Base class of policies: a distribution over actions that can be sampled and evaluated.

    A subclass sets ``module`` and defines ``sample`` and ``likelihood``. The other members have
    defaults that suit a policy whose module computes in its own dtype. Everything optional is a
    mixin below: a policy that can answer an environment also inherits from ``ConversationMixin``,
    one with a value head from ``ValueHeadMixin``.

    Contract: ``likelihood`` of what ``sample`` returned equals ``sampler_logprobs`` where ``mask``
    is True, so that the first ratio is 1. ``gruppo.check_policy`` verifies it.
    """

    module: nn.Module
    """The master weights, which the optimizer trains."""
    modality: Modality
    """What differs between kinds of models before one is open; the neutral ``Modality`` by
    default."""
    likelihood_outputs: ClassVar[frozenset[str]] = frozenset()
    """Outputs that ``likelihood`` can return besides log-probs; with "gaussian", KL divergences are
    exact."""
    origin: Any = None
    """The function that made the policy, if it was opened by ``--model FILE.py:FUNCTION``."""

    @property
    def device(self) -> torch.device:
        return device_of(self.module)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of forward and backward."""
        return next(self.module.parameters()).dtype

    @property
    def compute_module(self) -> nn.Module:
        """The module that computes: ``module``, or a copy of it in another dtype."""
        return self.module

    def refresh(self, *, force: bool = False) -> None:
        """Copy the weights of ``module`` to ``compute_module``, if that is a copy."""

    def to(self, device: torch.device) -> None:
        """Move the policy to a device, in place."""
        self.module.to(device)

    def at(self, module: nn.Module) -> Self:
        """Return this policy over other weights of the same architecture, such as those of a
        reference."""
        other = copy.copy(self)  # shallow: tokenizer and options are shared
        other.module = module.eval()
        vars(other).pop("value_head", None)
        return other

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard the weights over ranks, in place, with ``apply(module, units=None,
        compute_dtype=None)``.

        ``units``: parts that are sharded by themselves; None for the layers of the module.
        """
        apply(self.module)

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: parameters and persistent buffers by name, tied weights
        once."""
        return {
            name: tensor.detach().contiguous()
            for name, tensor in saved_tensors(self.module).items()
        }

    def save(self, folder: Path) -> None:
        """Write the trained weights to a folder from which ``load`` restores them."""
        save_file(self.checkpoint_weights(), folder / "model.safetensors")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the weights that ``save`` wrote, in place."""
        weights = load_file(folder / "model.safetensors")
        for name, tensor in self.checkpoint_weights().items():
            # copy_ would broadcast some other shapes
            if name not in weights or weights[name].shape != tensor.shape:
                raise GruppoError(f"""{folder}: {name} is missing or not of the shape
                    {list(tensor.shape)}. Open the folder with the function that made the
                    policy.""")
            tensor.copy_(weights[name])

    def check_prompt(self, prompt: Prompt, sampling: Any) -> str | None:
        """Return why this prompt cannot be sampled from, with what to do; None if it can."""
        return None

    def check_sampling(self, sampling: Any) -> Any:
        """Return the sampling parameters that are used; raise GruppoError for those that likelihood
        cannot evaluate."""
        return sampling

    def sample(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """Sample ``request.size`` rows of each prompt; randomness depends on (seed, draw, sample,
        position) alone."""
        raise NotImplementedError

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Evaluate the actions of a micro-batch in one forward, with gradient."""
        raise NotImplementedError

    def micro_batches(
        self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int
    ) -> list[MicroBatch]:
        """Split the rows with a loss into micro-batches of at most ``budget`` actions, padding
        included.

        Each action of ``loss_mask`` is in exactly one micro-batch; a longer row is one of its own.
        """
        rows = loss_mask.any(dim=1).nonzero()[:, 0]  # [b] of [B]
        columns = loss_mask.shape[1]
        parts = rows.split(max(budget // max(columns, 1), 1))
        # no rows split into one empty part
        return [MicroBatch(part, slice(0, columns)) for part in parts if len(part)]


# --- what some policies can do as well ------------------------------------------------------------
# Methods without a neutral default are asked for by isinstance, once, when a run is built. The
# classes whose members all have one (``PromptMixin``, ``DescriptionMixin``, ``StatisticsMixin``,
# ``MemoryMixin``, ``AdapterMixin``) stand in for a policy that is none: ``part(policy,
# MemoryMixin).bytes_per_unit()``.


class ConversationMixin:
    """A policy whose rows can go on after an environment's reply."""

    def prepare_conversations(
        self, tools: Tools | None, tools_of: Callable[[Prompt], Tools] | None = None
    ) -> None:
        """Get ready for an environment with these tools (JSON schemas); None without an
        environment.

        ``tools_of``: those that a prompt names, if not all.
        """
        if tools:
            raise GruppoError(f"""{type(self).__name__} does not write tools into prompts. Leave the
                tools out, or define prepare_conversations.""")

    def continue_rollouts(
        self,
        rollouts: Rollouts,
        replies: Mapping[int, Any],
        sampling: Any,
        *,
        seed: int,
        max_reply_tokens: int = 256,
    ) -> Rollouts:
        """Append the replies of an environment to their rows and sample the next turn."""
        raise NotImplementedError


class ServingMixin:
    """A policy whose tokens an inference server can sample: ``sample`` and ``continue_rollouts``
    take ``generate``, a ``GenerateTokens`` that samples them elsewhere."""

    sample: Callable[..., Rollouts]
    continue_rollouts: Callable[..., Rollouts]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a row."""
        raise NotImplementedError

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in the compute dtype under the names of the model's files, tied ones
        under each name."""
        raise NotImplementedError

    def served_config(self) -> dict[str, Any]:
        """Return the model's config.json, without tied weights."""
        raise NotImplementedError

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a string, without tokens of a beginning or end."""
        raise NotImplementedError


class ValueHeadMixin:
    """A policy that predicts values from its own features, as PPO's shared critic."""

    value_head: nn.Module | None = None
    """Features [N, F] to values [N]. Not part of ``module``, so that saves, copies and references
    exclude it."""

    def feature_width(self) -> int:
        """Return F."""
        raise NotImplementedError

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Evaluate ``value_head`` before each action."""
        raise NotImplementedError

    def _values(self, features: Float[Tensor, "N F"] | None) -> Float[Tensor, "N"]:
        """Apply ``value_head``; None stands for the features of no action."""
        if self.value_head is None:
            raise GruppoError(
                "values were requested from a policy without a value head. Set policy.value_head "
                "first."
            )
        if features is None:
            return torch.zeros(0, device=device_of(self.value_head))
        return self.value_head(features)


class DemonstrationMixin:
    """A policy that can learn from targets."""

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Return why this prompt's target cannot be learned from, with what to do; None if it
        can."""
        return None

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Return one row per prompt whose actions are its target."""
        raise NotImplementedError

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b t"]:
        """Return the supervised loss of each action of the likelihood's rows."""
        return -likelihood.logprobs


class RestorationMixin:
    """A policy with a deterministic output for each degraded image."""

    def consistency_loss(
        self, rollouts: Rollouts, likelihood: Likelihood, ref: Likelihood
    ) -> Float[Tensor, "b t"]:
        """Return the consistency loss of each action; the likelihood has its "output"."""
        raise NotImplementedError


class RecomputeMixin:
    """A policy that can compute activations again in the backward pass."""

    def recompute(self) -> None:
        """Compute the activations of each layer again in the backward pass, instead of keeping
        them."""
        raise NotImplementedError


class AdapterMixin:
    """A policy that may train an adapter over weights that never change."""

    saves_base: ClassVar[bool] = False
    """Whether ``save`` reads the weights below an adapter too, as one that merges them."""

    def frozen_base(self) -> dict[str, Tensor]:
        """Return the weights that never change and that no checkpoint holds."""
        return {}

    @property
    def base_sha256(self) -> str | None:
        """SHA-256 of ``frozen_base``; None without one."""
        return None


class PromptMixin:
    """A policy with options of its own for how prompts become inputs of the module."""

    def configure_prompts(self, prompts: Any) -> None:
        """Write prompts as ``config.prompts`` says, before any is written."""

    def input_digests(self) -> dict[str, str | None]:
        """SHA-256 of what makes the module's inputs from prompts, such as the tokenizer; a resumed
        run compares it."""
        return {}

    def format_prompt(self, prompt: Prompt, *, is_target: bool = False) -> str | None:
        """Return the prompt, or its target, as the model reads it, for ``gruppo explain``; None if
        that is the same."""
        return None

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        """Return the inputs of a prompt typed after ``gruppo sample``: JSON if it is valid, else
        the text."""
        try:
            return json.loads(text)
        except ValueError:
            return text


class DescriptionMixin:
    """A policy that says how its actions and samples are shown."""

    action_name: ClassVar[str] = "action"
    """The term for one action in printed output: token, step, patch."""
    renders_images: ClassVar[bool] = False
    """Whether ``render`` returns images; see ``ImageDescriptionMixin``."""
    held_out_shown: ClassVar[int] = 0
    """Samples of an evaluation that trackers show."""

    @property
    def progress_unit(self) -> str:
        """What the rate of sampling counts."""
        return self.action_name

    def render(self, rollouts: Rollouts, row: int) -> Any:
        """Return a sample as it is shown: text, an image tensor [C, H, W] in [0, 1], or any object
        with a repr."""
        return rollouts.completions[row]

    def rows_to_show(self, group_ids: Int[Tensor, "B"], rewards: Float[Tensor, "B"]) -> list[int]:
        """Return the rows of a step that are shown: the best and the worst of the first group whose
        rewards differ."""
        own: list[int] = []
        for group in group_ids.unique():
            own = ranked_rows(group_ids == group, rewards)
            scored = rewards[own][rewards[own].isfinite()]
            if len(scored) and scored[0] > scored[-1]:
                break
        return list(dict.fromkeys([*own[:2], *own[-2:]]))

    def describe(
        self, config: Any, sampling: Any, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        """Return lines for ``gruppo explain``: what a step samples and trains on."""
        return []


class ImageDescriptionMixin(DescriptionMixin):
    """A policy whose samples are images, which are shown as sheets of several groups."""

    renders_images = True
    held_out_shown = 160
    progress_unit = "image"

    def rows_to_show(self, group_ids: Int[Tensor, "B"], rewards: Float[Tensor, "B"]) -> list[int]:
        """Return the best rows of the first groups."""
        groups = group_ids.unique()[:10]
        return [row for group in groups for row in ranked_rows(group_ids == group, rewards)[:8]]


def ranked_rows(is_own: Bool[Tensor, "B"], rewards: Float[Tensor, "B"]) -> list[int]:
    """Return the selected rows, the best first, and those without a reward last."""
    own = is_own.nonzero()[:, 0]
    order = rewards[own].nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
    return own[order].tolist()


class StatisticsMixin:
    """A policy with metrics of its own.

    Statistics are keyed "<reduction>:<metric>", such as "mean:eval/psnr"; reductions are attributes
    of ``Stat``.
    """

    def batch_stats(
        self,
        rollouts: Rollouts,
        rewards: Float[Tensor, "B"],
        sampling: Any,
        *,
        is_evaluation: bool = False,
    ) -> dict[str, Stat]:
        """Return statistics of sampled rows, or of greedy samples of held-out prompts."""
        return {}


class MemoryMixin:
    """A policy that knows the memory of its forwards, in units of the budget of
    ``micro_batches``."""

    budget_name: ClassVar[str] = "actions"
    """The unit of ``--optim.token-budget`` in printed output."""
    default_budgets: ClassVar[tuple[int, int]] = (4096, 65536)
    """Budgets of ``micro_batches`` if memory is not short: on a CPU, and on an accelerator."""
    out_of_memory_hint: ClassVar[str] = "Train a smaller module or sample shorter rows."
    """What to do if a single row does not fit into memory, for the error message."""

    def bytes_per_unit(self) -> int:
        """Return the activation memory of one unit of the budget; 0 if unknown."""
        return 0

    def longest_prompt(self, prompts: Sequence[Prompt] | Rollouts) -> int:
        """Return the units of the budget that the longest of these prompts takes; 0 if prompts take
        none."""
        return 0

    def memory_estimate(
        self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int
    ) -> dict[str, float]:
        """Return bytes by name that a step needs besides weights, gradients and optimizer state."""
        return {}


def part(policy: Any, kind: type[T]) -> T:
    """Return the policy as one of its optional kinds, or the neutral defaults of that kind."""
    return policy if isinstance(policy, kind) else kind()


def save_with_origin(policy: Policy, folder: Path) -> None:
    """Save a policy, and the function that makes it, if one does."""
    policy.save(folder)
    if policy.origin is not None:
        policy.origin.write(folder)


class Modality:
    """What differs between kinds of models before one is open. The defaults suit a policy from
    outside."""

    name: ClassVar[str] = "custom"
    config_section: ClassVar[type | None] = None
    """A frozen dataclass of options of its own, named ``--<name>.*`` on the command line."""
    rewards_read_images: ClassVar[bool] = False
    """Whether rewards may ask for a column ``images``."""
    has_lengths: ClassVar[bool] = True
    """Whether ``rollout.max_new_tokens`` limits the length of a row."""
    is_gaussian: ClassVar[bool | None] = None
    """Whether actions are continuous, with exact KL divergences; None if only the policy knows."""

    def matches(self, model: str) -> bool:
        """Return whether ``--model`` names a model of this modality; nothing is loaded."""
        return False

    def check_objective(self, config: Any, **facts: Any) -> None:
        """Raise GruppoError if the objective does not suit actions and lengths of this modality.

        ``facts``: what else ``Objective.check`` needs to know of the run.
        """
        max_length = config.rollout.max_new_tokens if self.has_lengths else None
        config.objective.check(max_length=max_length, is_gaussian=self.is_gaussian, **facts)

    def validate(self, config: Any) -> None:
        """Raise GruppoError for options that this modality does not use or cannot satisfy; nothing
        is loaded."""

    def open(self, config: Any, data: Any) -> tuple[Policy, dict[str, Any]]:
        """Open ``config.model``; return the policy and its origin for the manifest."""
        raise GruppoError(
            f"model {config.model!r} is unknown",
            option="model",
            advice="to a model, a folder or FILE.py:FUNCTION",
        )

    def load(
        self,
        model: str,
        *,
        compute: Any = "auto",
        trust_remote_code: bool = False,
        is_merged: bool = False,
    ) -> Policy:
        """Open a model to evaluate, sample or export it. ``is_merged``: with an adapter merged into
        its base."""
        raise GruppoError(
            f"model {model!r} is unknown. Name a model, a run's folder or FILE.py:FUNCTION."
        )

    def adapt(self, config: Any, policy: Policy, data: Any) -> Policy:
        """Return a policy given in memory as the options say, such as with a LoRA adapter."""
        if config.lora.rank or config.lora.adapter:
            raise GruppoError(
                f"LoRA is not supported by {type(policy).__name__}", advice="Leave $lora.* out"
            )
        return policy

    def sampling(self, config: Any, policy: Policy | None = None) -> Sampling:
        """Return the sampling parameters of training."""
        return config.rollout.sampling

    def inference_sampling(self, sampling: Any, temperature: float) -> Any:
        """Return the sampling parameters of ``gruppo sample``, from those of training."""
        return replace(sampling, temperature=float(temperature))

    def check(
        self, config: Any, policy: Policy, sampling: Any, data: PromptSource, rewards: Any
    ) -> None:
        """Raise GruppoError for data, rewards and options that this policy cannot be trained
        with."""

    def consistency_reads_reference(self, config: Any) -> bool:
        """Return whether a stage's consistency term compares with the reference."""
        return False

    def parameter_groups(self, config: Any, policy: Policy) -> list[ParameterGroup]:
        """Return the trainable parameters, grouped by learning rate factor and gradient
        clipping."""
        return [
            ParameterGroup(
                tuple(name for name, p in policy.module.named_parameters() if p.requires_grad)
            )
        ]

    def critic(self, config: Any, policy: Policy, data: Any) -> Critic | None:
        """Return a critic of the untrained policy; None for the generic value head."""
        if config.critic.kind == "separate":
            raise GruppoError(
                f"critic.kind='separate': {type(policy).__name__} has no separate critic",
                option="critic.kind",
                advice="shared",
            )
        return None

    def absolute_paths(self, config: Any, absolute: Callable[[str], str]) -> Any:
        """Return the config with the files of this modality's options as absolute paths."""
        return config


# After both classes: each names the other.
Policy.modality = Modality()


@runtime_checkable
class Engine(Protocol):
    """Where samples come from. A subclass defines ``generate`` and ``sync``; the rest has neutral
    defaults."""

    concurrency: int = 0
    """Calls of ``generate`` that may run at a time, each in a thread of its own, while the policy
    is trained and while ``sync`` runs; ``engine.lag`` needs 1 or more. A call that ``sync``
    overtakes may go on with the new weights; ``policy_version`` says which weights chose each
    action. ``close`` ends all calls."""

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """Sample the requests; rows carry the version of the weights that chose their actions."""
        ...

    def continue_rollouts(
        self,
        rollouts: Rollouts,
        replies: Mapping[int, Any],
        sampling: Any,
        *,
        seed: int,
        max_reply_tokens: int = 256,
    ) -> Rollouts:
        """Append the replies of an environment to their rows and sample the next turn."""
        raise GruppoError(f"""{type(self).__name__} cannot continue rows after an environment's
            reply. Define continue_rollouts, or leave the environment out.""")

    def sync(self, policy: Policy, version: int) -> None:
        """Load the policy's weights as ``version``; return once a probe has shown that the sampler
        holds them."""
        ...

    def sleep(self) -> None:
        """Release memory of the device between the samples of a step and its update."""
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}

    def progress(self) -> str:
        """Return what the engine is doing, for the screen; "" if there is nothing to say."""
        return ""

    def close(self) -> None:
        """Release what the engine holds."""
        return


class Reward(Protocol):
    """Scores rollouts; higher is better, NaN means unscored. Returns [B], or [B, T] with
    ``scores_steps``."""

    name: str
    scores_steps: bool = False
    """Whether it returns a score at each action that ends a step, NaN elsewhere."""
    scores_turns: bool = False
    """Whether the steps are the turns of a conversation."""
    columns: Collection[str] = ()
    """Data columns that it needs."""
    memory_bytes: int = 0
    """Of its weights."""

    def __call__(self, rollouts: Rollouts) -> Tensor: ...

    def check(self, columns: Collection[str]) -> None:
        """Refuse data with these columns by raising an error."""
        return


class Critic(Protocol):
    """Predicts the return before each action, V(s_t)."""

    module: nn.Module
    """What is trained beside the policy: a head, or a network with its head."""
    is_shared: bool
    """Whether the head reads the policy's features; ``likelihood`` with the output "values" then
    returns them too."""

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Evaluate with gradient; 0 where mask is False."""

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Return what a checkpoint of the critic holds, by name."""

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard the network of its own over ranks, if it has one; see ``Policy.shard``."""
        return

    def recompute(self) -> None:
        """Compute activations of a network of its own again in the backward pass; see
        ``RecomputeMixin.recompute``."""
        return

    def zero_grad(self) -> None:
        """Release gradients of copies that ``module`` does not hold, after a failed pass."""
        return

    def bytes_per_unit(self) -> int:
        """Return the activation memory of one unit of the policy's budget; 0 if unknown or
        shared."""
        return 0

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        """Return bytes by name of the weights and their copies; gradients and optimizer state are
        counted with all."""


class Reference(Protocol):
    """What the KL term is measured against."""

    is_offloaded: bool
    """Whether the weights are offloaded between uses; it is then evaluated in one pass before a
    batch's updates."""
    follows_policy: bool
    """Whether the weights change, by ``update`` or ``reset_to``."""

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard a copy of the weights over ranks, if it holds one; called after the policy's."""
        return

    def on_device(self) -> AbstractContextManager[None]:
        """Hold the weights on the compute device within."""

    def active(self) -> AbstractContextManager[Policy]:
        """Yield the policy over the reference's weights; within, a module that it shares has these
        weights."""

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood: ...

    def update(self, policy: Policy, step: int) -> None:
        """Follow the policy after step 1, 2, ..., if this reference does."""

    def reset_to(self, policy: Policy) -> None:
        """Copy the policy's current weights, if ``follows_policy``."""

    def distance(self, policy: Policy) -> float:
        """Return |policy - reference| / |reference| over the trained weights."""

    def memory_estimate(self, dtype_bytes: int) -> dict[str, float]:
        """Return the bytes that the reference holds during updates, by name."""

    def frozen_state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights that must never change, by name."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights that change, by name."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Tracker(Protocol):
    """A destination of metrics and samples. What a subclass does not override does nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        return

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write samples of a step or an evaluation."""
        return

    def close(self) -> None:
        """Write what is still to be written and release the destination."""
        return


class PromptSource(Protocol):
    """A stream of prompts with a position.

    A source of one's own needs ``take``, ``state_dict`` and ``load_state_dict``; what else it lacks
    is filled in with neutral values (``gruppo.data.source.SourceWrapper``).
    """

    columns: Sequence[str] | None
    """What rewards can ask for: "target", and the keys of ``Prompt.meta``; None if unknown."""
    epoch_size: int
    """Draws in which each training item comes once; 0 for an endless source."""
    classes: int | list[str] | None
    """Number or names of the classes, where prompts are classes."""
    name: str

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""

    def held_out(self, n: int) -> list[Prompt]:
        """Return at most ``n`` evaluation prompts, which the stream never contains."""

    def all_prompts(self) -> Iterable[Prompt]:
        """Return every prompt once; none where that is unknown or expensive."""

    def fingerprint(self) -> str | None:
        """Return a hash of the data, apart from the seed."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once."""
    persistent = (
        module.state_dict().keys()
    )  # which names tied parameters twice, and named_parameters once
    return dict(module.named_parameters()) | {
        n: b for n, b in module.named_buffers() if n in persistent
    }


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; sharded weights may be kept on the CPU between
    uses."""
    parameter: Any = next(module.parameters())
    mesh = getattr(
        parameter, "device_mesh", None
    )  # of a DTensor, whose class takes two seconds to import
    if (
        mesh is None or mesh.device_type != "cuda"
    ):  # an offloaded shard is on the CPU, and its mesh is not
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def peek(source: PromptSource, n: int = 8) -> list[Prompt]:
    """Return the first prompts of a source, which the stream will return again."""
    state = source.state_dict()
    prompts = source.take(n)
    source.load_state_dict(state)
    return prompts


def check_values(values: Tensor, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
    """Return the values if there is one per action of the micro-batch; [b, 1] or [b] would
    broadcast silently."""
    needed = (len(micro_batch.rows), micro_batch.cols.stop - (micro_batch.cols.start or 0))
    if tuple(values.shape) != needed:
        raise GruppoError(f"""the critic returned values of shape {list(values.shape)} for a
            micro-batch of {list(needed)} (rows, actions); it needs one value before each action.
            Return [b, t] from Critic.values.""")
    return values


@torch.no_grad()
def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names and numbers, in the dtype they have."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + b"\0")
        # as bytes: numpy has no bfloat16
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
