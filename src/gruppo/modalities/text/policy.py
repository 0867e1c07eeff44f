"""A language model as a policy: its actions are tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo.core.distributions import chunked_categorical
from gruppo.modalities.common.lora import base_of, base_weights, has_adapter
from gruppo.modalities.text.backbones import Backbone
from gruppo.modalities.text.chat import Chat, output_of
from gruppo.modalities.text.demonstrations import demonstrated, refusal
from gruppo.modalities.text.generation import cut_at_stop, write
from gruppo.modalities.text.layouts import features_before, micro_batches_by_group, micro_batches_by_length
from gruppo.modalities.text.memory import TOKENS, TOKENS_ON_CPU, bytes_per_token, working_memory
from gruppo.modalities.text.precision import ComputeCopy
from gruppo.modalities.text.turns import written_on
from gruppo.protocols import Outputs, Policy
from gruppo.seeds import uniforms_at
from gruppo.types import GruppoError, Likelihood, MicroBatch, Prompt, Request, Rollouts, Sampling

BATCH_ROWS = 128
"""Rows decoded together. Groups are not split; a larger group is a batch of its own."""


class TextPolicy(Policy):
    """Samples completions and evaluates them under the same distribution: temperature, top-k and top-p included.

    ``module`` holds the master weights that an optimiser trains. Arithmetic runs on ``compute``, the module itself or a
    bfloat16 copy that follows it. Dropout is off in both: sampled and scored rows must come from one network.
    """

    supports = frozenset({"conversations", "demonstrations", "lora", "separate_critic", "shared_critic"})
    likelihood_outputs = frozenset({"entropy", "entropy_value", "values"})
    action_name, budget_name = "token", "tokens"

    def __init__(
        self,
        module: nn.Module,
        backbone: Backbone,
        chat: Chat,
        *,
        context: int | None = None,
        compute_dtype: torch.dtype = torch.float32,
        chunk: int = 256,
    ) -> None:
        self.module = module.eval()
        self.chat = chat
        self.context = context
        self.chunk = chunk
        self._compute_dtype = compute_dtype
        own = {parameter.dtype for parameter in module.parameters()}
        self.copy = None if own == {compute_dtype} else ComputeCopy(module, compute_dtype)
        self.backbone = backbone.on(module if self.copy is None else self.copy.module)
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]; beside ``module``, so that saves, copies and references are without it."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._compute_dtype

    @property
    def compute_module(self) -> nn.Module:
        """The module that computes: the master itself or its bfloat16 copy."""
        return self.backbone.module

    def at(self, module: nn.Module) -> TextPolicy:
        """This policy over other weights of the same kind, without a copy of its own: a reference."""
        other = object.__new__(TextPolicy)
        parts = {"module": module.eval(), "copy": None, "backbone": self.backbone.on(module), "value_head": None}
        other.__dict__.update(self.__dict__, **parts)
        return other

    def trunk(self) -> nn.Module:
        """The part of the master weights that computes the features."""
        return self.backbone.on(self.module).trunk

    @torch.no_grad()
    def feature_width(self) -> int:
        """Numbers at each position that ``value_head`` reads; those of a model that cannot be split are its logits."""
        return self.backbone.features(torch.zeros(1, 1, dtype=torch.long, device=self.device)).shape[-1]

    def refresh(self, *, force: bool = False) -> None:
        """Bring the compute copy, if there is one, up to the master weights."""
        if self.copy is not None:
            self.copy.refresh(force=force)

    def _prepare(self) -> None:
        """Whatever was done to the module since the last call: no dropout, and the weights as they are now."""
        self.module.eval()
        self.backbone.module.eval()
        self.refresh()

    def save(self, folder: Path) -> None:
        """The master weights and the tokenizer; of a Hugging Face model, a folder that ``from_pretrained`` opens."""
        self.backbone.on(self.module).save(folder)
        self.chat.save(folder)

    def to(self, device: torch.device) -> None:
        if device != self.device:
            raise GruppoError(f"this policy is on {self.device}; open the model on {device} with --device instead.")

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Of a module with adapters, the trained adapter alone."""
        if has_adapter(self.module):
            return {name: p.detach().contiguous() for name, p in self.module.named_parameters() if p.requires_grad}
        return super().checkpoint_weights()

    def frozen_base(self) -> dict[str, Tensor]:
        return base_weights(self.module) if has_adapter(self.module) else {}

    @property
    def base_sha256(self) -> str | None:
        base = base_of(self.module)
        return None if base is None else base.sha256

    def describe(self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int) -> list[str]:
        rows, lengths = config.rollout.prompts * group_size, [len(self.chat.encode(p.inputs)) for p in prompts]
        mean, is_padded = sum(lengths) / len(lengths), self.backbone.layout == "padded"
        trained = (rows if is_padded else config.rollout.prompts) * mean + rows * config.rollout.max_new_tokens
        shared = "the prompt with every row" if is_padded else "a group's prompt once"
        replies = "; and the environment's replies" if config.environment.reply else ""
        return [
            f"prompts     {mean:.0f} tokens on average, {max(lengths)} at most (of {len(lengths)})",
            f"sampled     at most {rows * config.rollout.max_new_tokens:,} tokens per step, "
            f"{config.rollout.max_new_tokens} per row",
            f"trained on  at most {trained:,.0f} tokens per epoch, {shared}{replies}",
        ]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        return [{"role": "user", "content": text}] if self.chat.can_chat and not is_plain else text

    def render(self, rollouts: Rollouts, row: int) -> Any:
        return rollouts.completions[row]

    def format_prompt(self, prompt: Prompt) -> str:
        return repr(self.chat.text_with_specials(self.chat.encode(prompt.inputs)))

    def format_demonstration(self, prompt: Prompt) -> str:
        demonstration = self.demonstrations([prompt], seed=0)
        ids = demonstration.actions[0, : int(demonstration.lengths[0])].tolist()
        return f"{self.chat.text_with_specials(ids)!r}  ({len(ids)} tokens)"

    def longest_prompt_of(self, prompts: Sequence[Prompt]) -> int:
        return max(len(self.chat.encode(prompt.inputs)) for prompt in prompts)

    def memory_estimate(self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int) -> dict[str, float]:
        rows = max(min(BATCH_ROWS, config.rollout.prompts * config.rollout.group_size), group_size)
        return working_memory(self, config, self.longest_prompt_of(prompts), budget, rows)

    def default_budget(self) -> int:
        return TOKENS_ON_CPU if self.device.type == "cpu" else TOKENS

    def bytes_per_unit(self, *, least: bool = False) -> int:
        width = 2 if self.compute_dtype == torch.bfloat16 else 4
        layout = "stream" if least else self.backbone.layout
        return bytes_per_token(getattr(self.module, "config", None), width, layout)

    def longest_prompt(self, rollouts: Rollouts) -> int:
        return max((len(ids) for ids in rollouts.shared["prompt_ids"]), default=0)

    def longest_row(self, rollouts: Rollouts, rows: Int[Tensor, "b"]) -> int:
        prompts = torch.tensor([len(ids) for ids in rollouts.shared["prompt_ids"]])[rollouts.group_ids[rows]]
        return int((rollouts.lengths[rows] + prompts).max())

    def out_of_memory_hint(self, units: int) -> tuple[str, str]:
        return (
            f"one row of {units} tokens",
            "Set a lower --rollout.max-new-tokens, shorten the prompts, or train a smaller --model; "
            "--optim.token-budget cannot cut a row.",
        )

    # --- sampling ---

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        """Why this prompt cannot be sampled from, or None."""
        if self.context is None:
            return None
        tokens = len(self.chat.encode(prompt.inputs))
        if tokens + sampling.max_actions <= self.context:
            return None
        return (
            f"prompt {prompt.id!r} has {tokens} tokens, and {sampling.max_actions} new ones make "
            f"{tokens + sampling.max_actions}; the model's context holds {self.context}. Shorten or remove it, or "
            "lower --rollout.max-new-tokens."
        )

    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """``request.size`` completions of each prompt. A token's randomness hangs on (seed, draw, sample, position)."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        for request in requests:
            if why := self.check_prompt(request.prompt, sampling):
                raise GruppoError(why)
        _refuse_namesakes(requests)
        self._prepare()
        return Rollouts.cat([self._sample(part, sampling, seed) for part in _batches(requests)])

    def _sample(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> Rollouts:
        prompts = [torch.tensor(self.chat.encode(r.prompt.inputs), device=self.device) for r in requests]
        owners = torch.tensor([p for p, r in enumerate(requests) for _ in range(r.size)])
        addresses = [(r.prompt.draw, r.first + i) for r in requests for i in range(r.size)]
        uniforms = torch.stack([uniforms_at(seed, draw, i, sampling.max_actions) for draw, i in addresses])
        with torch.no_grad():
            decoding = self.backbone.start(prompts, owners.to(self.device))
            written = write(decoding, uniforms, sampling, eos_ids=self.chat.eos_ids, text=self.chat.text_with_specials)
        columns = max(int(written.lengths.max()), 1)
        mask = torch.arange(columns) < written.lengths[:, None]
        rows = len(owners)
        return Rollouts(
            prompts=tuple(r.prompt for r in requests),
            group_ids=owners,
            actions=written.tokens[:, :columns],
            mask=mask,
            lengths=written.lengths,
            completions=tuple(
                self._output(written.tokens[i, mask[i].nonzero()[:, 0]], requests[int(owners[i])].prompt, sampling)
                for i in range(rows)
            ),
            sampler_logprobs=torch.where(mask, written.logprobs[:, :columns], 0),
            policy_version=torch.zeros(rows, columns, dtype=torch.long),
            temperature=torch.full((rows,), float(sampling.temperature)),
            finish=written.finish,
            shared={"prompt_ids": tuple(prompt.cpu() for prompt in prompts)},
            per_row={
                "top_k": torch.full((rows,), sampling.top_k),
                "top_p": torch.full((rows,), sampling.top_p, dtype=torch.float64),
            },
        )

    def continue_rollouts(
        self,
        rollouts: Rollouts,
        replies: Mapping[int, Any],
        sampling: Sampling,
        *,
        seed: int,
        max_reply_tokens: int = 256,
    ) -> Rollouts:
        """Rows that got a reply (a text, or messages, by row), written on with a further turn; the others as they are.

        A reply's tokens are columns whose mask is False. ``sampling.max_actions`` is of all that the policy writes in a
        row. ``rollouts.per_row`` needs what ``gruppo.environments.converse`` holds of each row: its number in the
        group, its last words, and whether its environment failed.
        """
        self._prepare()
        limits = {"max_reply_tokens": max_reply_tokens, "at_once": BATCH_ROWS}
        return written_on(self, rollouts, replies, sampling, seed=seed, **limits)

    def _output(self, ids: Tensor, prompt: Prompt, sampling: Sampling) -> Any:
        return output_of(cut_at_stop(self.chat.text(ids.tolist()), sampling.stop), prompt.inputs)

    # --- evaluating ---

    def micro_batches(self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int) -> list[MicroBatch]:
        """Pieces of at most ``budget`` tokens, padding included; what is longer alone is a piece of its own.

        Where a prompt is read once for its group, group-mates stay together; otherwise rows of like length do.
        """
        prompt_lengths = torch.tensor([len(ids) for ids in rollouts.shared["prompt_ids"]])[rollouts.group_ids]
        wanted = loss_mask.any(dim=1).nonzero()[:, 0]
        if self.backbone.layout == "padded":
            micro_batches = micro_batches_by_length(prompt_lengths + rollouts.lengths, wanted, budget)
        else:
            padded = self.backbone.layout == "packed"
            of = (prompt_lengths, rollouts.lengths, rollouts.group_ids)
            micro_batches = micro_batches_by_group(*of, wanted.tolist(), budget, padded=padded)
        return [MicroBatch(torch.tensor(rows), slice(0, int(rollouts.lengths[rows].max()))) for rows in micro_batches]

    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        """Log-probabilities at the sampling temperature, top-k and top-p of the rollouts; 0 where mask is False.

        "values" come from ``value_head`` and the same forward.
        """
        self._prepare()
        rows = micro_batch.rows
        mask = micro_batch.of(rollouts.mask)  # [b, t]
        actions = micro_batch.of(rollouts.actions)
        top_k, top_p = self._distribution(rollouts, rows)
        row, column = mask.nonzero(as_tuple=True)
        features = self._action_features(rollouts, rows, row, column)  # [N, F]
        logprobs, entropy = chunked_categorical(
            features,
            self.backbone.head,
            actions[row, column].to(self.device),
            rollouts.temperature[rows][row].to(self.device),
            chunk=self.chunk,
            top_k=top_k,
            top_p=top_p,
            entropy="gradient" if "entropy" in outputs else "value" if "entropy_value" in outputs else "none",
        )
        values = self._values(features) if "values" in outputs else None
        place = (row.to(self.device), column.to(self.device))
        return Likelihood(
            _spread(logprobs, place, mask.shape),
            None if entropy is None else _spread(entropy, place, mask.shape),
            values=None if values is None else _spread(values, place, mask.shape),
        )

    def check_demonstration(self, prompt: Prompt) -> str | None:
        """Why this prompt's target cannot be learned from, or None."""
        return refusal(self.chat, prompt, self.context)

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Each prompt answered with its target, as the policy would write and end it. Nothing is drawn."""
        for prompt in prompts:
            if why := self.check_demonstration(prompt):
                raise GruppoError(why)
        return demonstrated(self.chat, prompts)

    def supervised_loss(self, rollouts: Rollouts, likelihood: Likelihood) -> Float[Tensor, "b t"]:
        """-log p of each token of the answers: cross-entropy, in nats."""
        return -likelihood.logprobs

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """What ``value_head`` says before each action, 0 where mask is False; no logits are computed."""
        self._prepare()
        mask = micro_batch.of(rollouts.mask)
        row, column = mask.nonzero(as_tuple=True)
        values = self._values(self._action_features(rollouts, micro_batch.rows, row, column))
        return _spread(values, (row.to(self.device), column.to(self.device)), mask.shape)

    def _values(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N"]:
        if self.value_head is None:
            raise GruppoError("values are wanted of a policy without a value head. Set policy.value_head first.")
        return self.value_head(features)

    def _action_features(self, rollouts: Rollouts, rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Features at the position before each action: the one that predicts it."""
        groups, owners = rollouts.group_ids[rows].unique(return_inverse=True)
        prompts = [rollouts.shared["prompt_ids"][g] for g in groups.tolist()]
        completions = [rollouts.actions[r, : int(rollouts.lengths[r])] for r in rows.tolist()]
        return features_before(self.backbone, prompts, completions, owners, row, column)

    def _distribution(self, rollouts: Rollouts, rows: Int[Tensor, "b"]) -> tuple[int, float]:
        if (rollouts.temperature[rows] <= 0).any():
            raise GruppoError(
                "these rollouts are greedy (temperature 0), which has no density to learn from. Sample at 1.0."
            )
        top_k, top_p = rollouts.per_row["top_k"][rows].unique(), rollouts.per_row["top_p"][rows].unique()
        if len(top_k) > 1 or len(top_p) > 1:
            raise GruppoError("these rollouts mix several top_k or top_p; evaluate each kind apart.")
        return (int(top_k[0]), float(top_p[0])) if len(top_k) else (0, 1.0)


def _spread(numbers: Float[Tensor, "N"], place: tuple[Tensor, Tensor], shape: Sequence[int]) -> Float[Tensor, "b t"]:
    """One number of each action at its row and column, 0 elsewhere. Finding the place on a GPU would wait for it."""
    return torch.zeros(shape, dtype=numbers.dtype, device=numbers.device).index_put(place, numbers)


def _refuse_namesakes(requests: Sequence[Request]) -> None:
    """Rows of equal prompt id and draw become one group, so one id and draw must mean one prompt."""
    asked: dict[tuple[str, int], Prompt] = {}
    for prompt in (request.prompt for request in requests):
        if asked.setdefault((prompt.id, prompt.draw), prompt).inputs != prompt.inputs:
            raise GruppoError(
                f"two different prompts have the id {prompt.id!r} and the draw {prompt.draw}; their rows would become "
                "one group. Give each prompt an id of its own."
            )


def _batches(requests: Sequence[Request]) -> list[list[Request]]:
    batches: list[list[Request]] = [[]]
    for request in requests:
        if batches[-1] and sum(r.size for r in batches[-1]) + request.size > BATCH_ROWS:
            batches.append([])
        batches[-1].append(request)
    return batches
