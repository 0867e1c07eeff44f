"""A language model as a policy: its actions are tokens."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_model
from torch import Tensor, nn

from gruppo.core.distributions import chunked_categorical
from gruppo.core.layers import recompute_layers
from gruppo.loading import counted
from gruppo.modalities.common.adapters import save_adapter
from gruppo.modalities.common.lora import AdaptablePolicy, has_adapter
from gruppo.modalities.text.backbones import Backbone
from gruppo.modalities.text.chat import Chat, Tools, special_token_error
from gruppo.modalities.text.chat_template import rewritten
from gruppo.modalities.text.demonstrations import demonstrate
from gruppo.modalities.text.generation import (
    append_turns,
    cut_at_stop,
    generate_locally,
    next_turns,
)
from gruppo.modalities.text.layouts import split_rows
from gruppo.modalities.text.memory import TOKENS, TOKENS_ON_CPU, activations, working_memory
from gruppo.modalities.text.precision import ComputeCopy, weight_versions
from gruppo.protocols import (
    ConversationMixin,
    DemonstrationMixin,
    DescriptionMixin,
    GenerateTokens,
    MemoryMixin,
    Outputs,
    PromptMixin,
    ServingMixin,
    ShardingMixin,
    ValueHeadMixin,
)
from gruppo.types import (
    Generated,
    GruppoError,
    Likelihood,
    MicroBatch,
    Prompt,
    Request,
    Rollouts,
    Sampling,
    TokenBatch,
)

log = logging.getLogger("gruppo")

BATCH_ROWS = 128
"""Rows decoded together. Groups are not split; a larger group is a batch of its own."""
ToolsOf = Callable[[Prompt], Sequence[Mapping[str, Any]]]
"""JSON schemas of the tools that a prompt's conversation has."""


class TextPolicy(
    AdaptablePolicy,
    ConversationMixin,
    ServingMixin,
    DemonstrationMixin,
    ValueHeadMixin,
    ShardingMixin,
    PromptMixin,
    DescriptionMixin,
    MemoryMixin,
):
    """Samples completions and evaluates them under the same distribution, temperature, top-k and
    top-p included.

    ``module`` holds the master weights that an optimizer trains; ``compute_module`` is the module
    itself or a bfloat16 copy that follows it. Dropout is off in both, since sampled and scored rows
    must come from one network.
    """

    likelihood_outputs = frozenset({"entropy", "entropy_value", "values"})
    action_name, budget_name, default_budgets = "token", "tokens", (TOKENS_ON_CPU, TOKENS)
    out_of_memory_hint = (
        "one row of {units} tokens",
        "Set a lower --rollout.max-new-tokens, shorten the prompts, or train a smaller --model; "
        "--optim.token-budget cannot cut a row.",
    )
    compute_dtype: torch.dtype = torch.float32
    is_recomputed = False
    """Whether the backward pass computes each layer's activations again."""
    forced_refreshes = 0
    """Refreshes after changes that versions of tensors may not show, as of a sync."""

    def input_digests(self) -> dict[str, str | None]:
        return self.chat.digests()

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
        self.backbone, self.chat, self.context, self.chunk = backbone, chat, context, chunk
        self.compute_in(compute_dtype)
        self.tools_of: ToolsOf = lambda prompt: ()
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]; not part of ``module``, so that saves, copies and
        references lack it."""

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the compute dtype, in place; the copy is made anew if one is needed."""
        self.compute_dtype = dtype
        is_needed = {p.dtype for p in self.module.parameters() if p.is_floating_point()} != {dtype}
        self.copy = ComputeCopy(self.module, dtype) if is_needed else None
        self.backbone = replace(
            self.backbone, module=self.module if self.copy is None else self.copy.module
        )

    def to(self, device: torch.device) -> None:
        self.module.to(device)
        self.compute_in(self.compute_dtype)

    @property
    def compute_module(self) -> nn.Module:
        return self.backbone.module

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard the master weights; FSDP casts them where they are gathered, in place of a copy."""
        self.copy, dtypes = (
            None,
            {p.dtype for p in self.module.parameters() if p.is_floating_point()},
        )
        self.backbone = replace(self.backbone, module=self.module, dtype=self.compute_dtype)
        apply(
            self.module,
            compute_dtype=None if dtypes == {self.compute_dtype} else self.compute_dtype,
        )

    def recompute(self) -> None:
        self.is_recomputed = recompute_layers(self.module, self.compute_module)

    def at(self, module: nn.Module) -> TextPolicy:
        """Return this policy over other weights of the same kind, without a copy or value head: a
        reference."""
        other = copy.copy(self)
        other.module, other.backbone = module.eval(), replace(self.backbone, module=module)
        other.copy = other.value_head = None
        return other

    def trunk(self) -> Any:
        """The part of the master weights that computes the features."""
        return self.module.base_model if self.backbone.splits else self.module

    @torch.no_grad()
    def feature_width(self) -> int:
        """Features at each position that a value head reads; the logits of a model that cannot be
        split."""
        return self.backbone.features(
            torch.zeros(1, 2, dtype=torch.long, device=self.device)
        ).shape[-1]

    def refresh(self, *, force: bool = False) -> None:
        """Turn dropout off and update the copy, whatever was done to the module since the last
        call."""
        self.module.eval()
        self.backbone.module.eval()
        self.forced_refreshes += force
        if self.copy is not None:
            self.copy.refresh(force=force)

    def weight_version(self) -> tuple[Any, ...]:
        """Equal as long as no weight of the policy has changed."""
        versions = weight_versions(self.module.parameters())
        return (self, self.module, self.forced_refreshes, *versions)

    def save(self, folder: Path) -> None:
        """Write the master weights and the tokenizer: a folder that ``from_pretrained`` opens.

        Of a plain module, only its weights, for ``safetensors.torch.load_model``.
        """
        module: Any = self.module
        if self.backbone.is_plain:
            folder.mkdir(parents=True, exist_ok=True)
            save_model(module, str(folder / "model.safetensors"))
            if self.backbone.source is not None:
                self.backbone.source.write(folder)
        elif has_adapter(module):
            save_adapter(module, folder)
        else:
            if (generation := getattr(module, "generation_config", None)) is not None:
                try:
                    generation.validate(strict=True)
                except ValueError:  # a published temperature without do_sample: transformers loads it, but cannot save
                    generation.do_sample = True
            module.save_pretrained(folder)
        self.chat.save(folder)

    def describe(
        self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        rows, lengths = config.rollout.prompts * group_size, [len(self.encode(p)) for p in prompts]
        mean, is_padded = sum(lengths) / len(lengths), self.backbone.layout == "padded"
        new, measured = config.rollout.max_new_tokens, counted(len(lengths), "prompt")
        trained = (rows if is_padded else config.rollout.prompts) * mean + rows * new
        shared = "the prompt with every row" if is_padded else "a group's prompt once"
        replies = "; and the environment's replies" if config.environment.names else ""
        return [
            f"prompts     {mean:.0f} tokens on average, at most {max(lengths)}; measured on "
            f"{measured}",
            f"sampled     at most {rows * new:,} tokens per step, {new} per row",
            f"trained on  at most {trained:,.0f} tokens per epoch, {shared}{replies}",
        ]

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        return [{"role": "user", "content": text}] if self.chat.can_chat and not is_plain else text

    def format_prompt(self, prompt: Prompt, *, is_target: bool = False) -> str:
        if not is_target:
            return repr(self.chat.text_with_specials(self.encode(prompt)))
        demonstration = self.demonstrations([prompt], seed=0)
        ids = demonstration.actions[0, : int(demonstration.lengths[0])].tolist()
        return f"{self.chat.text_with_specials(ids)!r}  ({len(ids)} tokens)"

    def memory_estimate(
        self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int
    ) -> dict[str, float]:
        rows = max(min(BATCH_ROWS, config.rollout.prompts * config.rollout.group_size), group_size)
        return working_memory(self, config, self.longest_prompt(prompts), budget, rows)

    def bytes_per_unit(self, *, least: bool = False) -> int:
        layout = "stream" if least else self.backbone.layout
        config = getattr(self.module, "config", None)
        return activations(config, 1, self.compute_dtype, layout, is_recomputed=self.is_recomputed)

    def longest_prompt(self, prompts: Sequence[Prompt] | Rollouts) -> int:
        ids = (
            prompts.shared["prompt_ids"]
            if isinstance(prompts, Rollouts)
            else map(self.encode, prompts)
        )
        return max(map(len, ids), default=0)

    def longest_row(self, rollouts: Rollouts, rows: Tensor) -> int:
        prompts = torch.tensor([len(ids) for ids in rollouts.shared["prompt_ids"]])[
            rollouts.group_ids[rows]
        ]
        return int((rollouts.lengths[rows] + prompts).max())

    # --- sampling ---

    def configure_prompts(self, prompts: Any) -> None:
        self.chat.configure(prompts)

    def prepare_conversations(
        self, tools: Sequence[Mapping[str, Any]] | None, tools_of: ToolsOf | None = None
    ) -> None:
        self.chat.set_tools(tools or ())
        self.tools_of = (
            (tools_of or (lambda prompt: self.chat.tools)) if tools else lambda prompt: ()
        )
        if tools is not None and self.chat.can_chat and (what := rewritten(self.chat)):
            log.info(
                "the model's chat template %s. Each turn is trained on as it was sampled, and "
                "stays so in its "
                "conversation; a server that renders the conversation again shows the model "
                "another one.",
                what,
            )

    def encode(self, prompt: Prompt) -> list[int]:
        return self.chat.encode(prompt.inputs, self.tools_of(prompt))

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        if isinstance(prompt.inputs, str) and self.tools_of(prompt):
            problem = (
                f"prompt {prompt.id!r} is a text, and tools need a conversation, into which "
                f"the chat template"
            )
            return (
                f"{problem} writes them. Give a list of messages, such as "
                f'[{{"role": "user", "content": ...}}].'
            )
        if self.chat.special_tokens == "refuse" and (
            token := self.chat.special_token_in(prompt.inputs)
        ):
            return special_token_error(prompt.id, token)
        new = sampling.max_actions
        if self.context is None or (tokens := len(self.encode(prompt))) + new <= self.context:
            return None
        problem = (
            f"prompt {prompt.id!r} has {tokens} tokens, and {new} new ones make "
            f"{tokens + new}; the model's"
        )
        return (
            f"{problem} context holds {self.context}. Shorten or remove it, or lower "
            f"--rollout.max-new-tokens."
        )

    def sample(self, requests: Sequence[Request], sampling: Sampling, *, seed: int) -> Rollouts:
        """Sample ``request.size`` completions of each prompt; randomness depends on (seed, draw,
        sample, position)."""
        self.refresh()
        return self.sample_with(
            partial(generate_locally, self), requests, sampling, seed=seed, batch_rows=BATCH_ROWS
        )

    def sample_with(
        self,
        generate: GenerateTokens,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        batch_rows: int = sys.maxsize,
    ) -> Rollouts:
        """``sample``, with tokens from ``generate``, which is called with at most ``batch_rows``
        rows."""
        if not requests or any(request.size < 1 for request in requests):
            raise ValueError("sample needs at least one request, each of size 1 or more.")
        prompts, batches = dict[tuple[str, int], Prompt](), [list[Request]()]
        for request in requests:
            prompt = request.prompt
            if why := self.check_prompt(prompt, sampling):
                raise GruppoError(why)
            if prompts.setdefault((prompt.id, prompt.draw), prompt).inputs != prompt.inputs:
                raise GruppoError(f"""two different prompts have the id {prompt.id!r} and the draw
                    {prompt.draw}; their rows would become one group. Give each prompt an id of its
                    own.""")
            # a group stays whole: its rows share the keys of their prompt
            if batches[-1] and sum(r.size for r in batches[-1]) + request.size > batch_rows:
                batches.append([])
            batches[-1].append(request)
        parts = [self._sample_batch(generate, batch, sampling, seed) for batch in batches]
        return Rollouts.cat(parts)

    def _sample_batch(
        self, generate: GenerateTokens, requests: Sequence[Request], sampling: Sampling, seed: int
    ) -> Rollouts:
        encoded = tuple(torch.tensor(self.encode(r.prompt)) for r in requests)
        owners = torch.tensor([p for p, r in enumerate(requests) for _ in range(r.size)])
        addresses = tuple((r.prompt.draw, r.first + i) for r in requests for i in range(r.size))
        can_continue = any(request.has_more_turns for request in requests)
        kept = (None,) * len(owners) if can_continue else None
        generated = generate(TokenBatch(encoded, owners, addresses, kept=kept), sampling, seed)
        texts, completions = list[str](), list[Any]()
        for row, length, owner in zip(
            generated.tokens, generated.lengths.tolist(), owners.tolist(), strict=True
        ):
            prompt, ids = requests[owner].prompt, row[:length].tolist()
            texts.append(cut_at_stop(self.chat.text(ids), sampling.stop))
            completions.append(
                self.completion(ids, texts[-1], prompt.inputs, self.tools_of(prompt), sampling.stop)
            )
        prompts = [request.prompt for request in requests]
        rollouts = _rollouts(prompts, owners, encoded, generated, completions, sampling)
        if self.chat.tools:  # a call of a tool is not in the message's content
            rollouts = replace(rollouts, per_row={**rollouts.per_row, "text": tuple(texts)})
        return rollouts

    def completion(
        self, ids: Sequence[int], text: str, inputs: Any, tools: Tools, stop: Sequence[str]
    ) -> Any:
        """What these sampled ids say, in the form of what they answer: a text or a list of one
        message."""
        if isinstance(inputs, str):
            return text
        return [self.chat.answer(ids, text, inputs, tools, stop)]

    def continue_rollouts(
        self,
        rollouts: Rollouts,
        replies: Mapping[int, Any],
        sampling: Any,
        *,
        seed: int,
        max_reply_tokens: int = 256,
    ) -> Rollouts:
        """Append replies (a text or messages, by row) and a further turn of the policy; other rows
        stay as they are.

        A reply's tokens are columns whose mask is False. ``sampling.max_actions`` counts all tokens
        that the policy samples in a row. ``rollouts.per_row`` needs the entries that
        ``gruppo.environments.converse`` adds: "sample", the row's number in its group, "text", its
        last turn, "environment_failure", "context_full" and "reencoded". Histories are not read
        again where ``sample`` or the last call has kept their keys and values ("kept").
        """
        self.refresh()
        options = {"seed": seed, "max_reply_tokens": max_reply_tokens, "batch_rows": BATCH_ROWS}
        return self.continue_with(
            partial(generate_locally, self), rollouts, replies, sampling, **options
        )

    def continue_with(
        self,
        generate: GenerateTokens,
        rollouts: Rollouts,
        replies: Mapping[int, Any],
        sampling: Any,
        *,
        seed: int,
        max_reply_tokens: int = 256,
        batch_rows: int = sys.maxsize,
    ) -> Rollouts:
        """``continue_rollouts``, with tokens from ``generate``, which is called with at most
        ``batch_rows`` rows."""
        rollouts, turns = next_turns(self, rollouts, replies, sampling, max_reply_tokens)
        for start in range(0, len(turns), batch_rows):
            rollouts = append_turns(
                self, generate, rollouts, turns[start : start + batch_rows], sampling, seed
            )
        return rollouts

    # --- serving ---

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        from torch.distributed.tensor import DTensor  # takes two seconds

        for name, tensor in self.module.state_dict().items():
            whole = (
                tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            )  # one tensor of FSDP at a time
            yield name, whole.to(self.compute_dtype) if whole.is_floating_point() else whole

    def served_config(self) -> dict[str, Any]:
        if self.backbone.is_plain:
            raise GruppoError(
                f"""a {type(self.module).__name__} of gruppo.from_module cannot be loaded by a
                    server; it needs to be a Hugging Face model""",
                advice="Leave $engine out",
            )
        dtype, module = str(self.compute_dtype).removeprefix("torch."), cast(Any, self.module)
        return {**module.config.to_diff_dict(), "tie_word_embeddings": False, "dtype": dtype}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.chat.eos_ids

    def encode_text(self, text: str) -> list[int]:
        return self.chat.encode_text(text)

    # --- likelihood ---

    def micro_batches(
        self, rollouts: Rollouts, loss_mask: Bool[Tensor, "B T"], budget: int
    ) -> list[MicroBatch]:
        """Split into micro-batches of at most ``budget`` tokens, prompts and padding included.

        Where a prompt is read once for its group, rows of a group stay together; otherwise rows of
        like length do.
        """
        prompt_lengths = torch.tensor([len(ids) for ids in rollouts.shared["prompt_ids"]])[
            rollouts.group_ids
        ]
        rows = loss_mask.any(dim=1).nonzero()[:, 0].tolist()
        parts = split_rows(
            prompt_lengths, rollouts.lengths, rollouts.group_ids, rows, budget, self.backbone.layout
        )
        return [
            MicroBatch(torch.tensor(part), slice(0, int(rollouts.lengths[part].max())))
            for part in parts
        ]

    def likelihood(
        self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()
    ) -> Likelihood:
        """Log-probabilities at the sampling temperature, top-k and top-p of the rollouts; 0 where
        mask is False.

        "values" come from ``value_head`` in the same forward.
        """
        rows = micro_batch.rows
        if (rollouts.temperature[rows] <= 0).any():
            raise GruppoError(
                "these rollouts are greedy (temperature 0), with no density to learn from. Sample "
                "at 1."
            )
        top_k, top_p = (
            rollouts.per_row["top_k"][rows].unique(),
            rollouts.per_row["top_p"][rows].unique(),
        )
        if len(top_k) > 1 or len(top_p) > 1:
            raise GruppoError(
                "these rollouts mix several top_k or top_p; evaluate each kind separately."
            )
        actions = micro_batch.of(rollouts.actions)
        features, row, column, place = self._action_features(rollouts, micro_batch)  # [N, F]
        logprobs, entropy = chunked_categorical(
            features,
            self.backbone.head,
            actions[row, column].to(self.device, non_blocking=True),
            rollouts.temperature[rows][row].to(self.device, non_blocking=True),
            chunk=self.chunk,
            top_k=int(top_k[0]) if len(top_k) else 0,
            top_p=float(top_p[0]) if len(top_p) else 1.0,
            entropy="gradient"
            if "entropy" in outputs
            else "value"
            if "entropy_value" in outputs
            else "none",
        )
        nats = None if entropy is None else _scatter(entropy, place, actions.shape)
        values = (
            _scatter(self._values(features), place, actions.shape) if "values" in outputs else None
        )
        return Likelihood(_scatter(logprobs, place, actions.shape), nats, values=values)

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "b t"]:
        """Values before each action, 0 where mask is False; no logits are computed."""
        features, _, _, place = self._action_features(rollouts, micro_batch)
        return _scatter(self._values(features), place, micro_batch.of(rollouts.mask).shape)

    def _action_features(
        self, rollouts: Rollouts, micro_batch: MicroBatch
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Features [N, F] at the position before each action, its row and column, and both of them
        on the device."""
        self.refresh()
        rows = micro_batch.rows
        mask = micro_batch.of(rollouts.mask)  # [b, t]
        row, column = mask.nonzero(as_tuple=True)
        groups, owners = rollouts.group_ids[rows].unique(return_inverse=True)
        prompts = [rollouts.shared["prompt_ids"][g] for g in groups.tolist()]
        completions = [rollouts.actions[r, : int(rollouts.lengths[r])] for r in rows.tolist()]
        features = self.backbone.features_before(prompts, completions, owners, row, column)
        return (
            features,
            row,
            column,
            tuple(index.to(self.device, non_blocking=True) for index in (row, column)),
        )

    # --- demonstrations ---

    def check_demonstration(self, prompt: Prompt) -> str | None:
        try:
            ids, _, _ = demonstrate(self.chat, prompt.inputs, prompt.target, self.tools_of(prompt))
            if not ids:
                return (
                    f"prompt {prompt.id!r} has no target to learn from: it is "
                    f"{prompt.target!r}. Give it one."
                )
            tokens = len(self.encode(prompt)) + len(ids)
        except GruppoError as error:
            return f"prompt {prompt.id!r}: {error}"
        if self.context is None or tokens <= self.context:
            return None
        problem = (
            f"prompt {prompt.id!r} and its target have {tokens} tokens; the model's context "
            f"holds {self.context}"
        )
        return f"{problem}. Shorten or remove it."

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Each prompt with its target as completion, as the policy would write and end it.

        A target may be a conversation: what the policy only reads there is not in ``mask``. There
        was no sampler: ``sampler_logprobs`` are 0.
        """
        for prompt in prompts:
            if why := self.check_demonstration(prompt):
                raise GruppoError(why)
        shown = [demonstrate(self.chat, p.inputs, p.target, self.tools_of(p)) for p in prompts]
        ids, masks = ([torch.tensor(row[part]) for row in shown] for part in (0, 1))
        actions = nn.utils.rnn.pad_sequence(ids, batch_first=True)  # [B, T]
        lengths = torch.tensor([len(row) for row in ids])
        rows = Generated(
            actions, torch.zeros(actions.shape), lengths, cast(Any, ("stop",) * len(prompts))
        )
        prompt_ids, completions = (
            [torch.tensor(self.encode(prompt)) for prompt in prompts],
            [row[2] for row in shown],
        )
        rollouts = _rollouts(
            prompts, torch.arange(len(prompts)), prompt_ids, rows, completions, Sampling()
        )
        return replace(rollouts, mask=nn.utils.rnn.pad_sequence(masks, batch_first=True))


def _rollouts(
    prompts: Sequence[Prompt],
    owners: Int[Tensor, "B"],
    prompt_ids: Sequence[Int[Tensor, "L"]],
    generated: Generated,
    completions: Sequence[Any],
    sampling: Sampling,
) -> Rollouts:
    """Collect rows into a batch; each row belongs to the prompt that owns it, an index."""
    rows, columns = len(owners), max(int(generated.lengths.max()), 1)
    top_p = torch.full((rows,), sampling.top_p, dtype=torch.float64)
    kept = {} if generated.kept is None else {"kept": generated.kept}
    mask = torch.arange(columns) < generated.lengths[:, None]
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=owners,
        actions=generated.tokens[:, :columns],
        mask=mask,
        lengths=generated.lengths,
        completions=tuple(completions),
        sampler_logprobs=torch.where(mask, generated.logprobs[:, :columns], 0),
        policy_version=torch.where(
            mask, 0 if generated.versions is None else generated.versions[:, :columns], 0
        ),
        temperature=torch.full((rows,), float(sampling.temperature)),
        finish=generated.finish,
        shared={"prompt_ids": tuple(ids.cpu() for ids in prompt_ids)},
        per_row={"top_k": torch.full((rows,), sampling.top_k), "top_p": top_p, **kept},
    )


def _scatter(
    values: Float[Tensor, "N"], place: tuple[Tensor, Tensor], shape: Sequence[int]
) -> Float[Tensor, "b t"]:
    """Put one value per action at its row and column, 0 elsewhere. A boolean mask would wait for
    the GPU."""
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_put(place, values)
