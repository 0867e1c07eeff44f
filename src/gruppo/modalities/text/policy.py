"""A language model as a policy: its actions are tokens."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_model
from torch import Tensor, nn

from gruppo.core.distributions import chunked_categorical
from gruppo.core.layers import recompute_layers
from gruppo.core.linear_head import EntropyMode
from gruppo.loading import counted
from gruppo.modalities.common.adapters import save_adapter
from gruppo.modalities.common.lora import AdaptablePolicy, has_adapter
from gruppo.modalities.text.backbones import Backbone
from gruppo.modalities.text.chat import Chat, Tools
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
    RecomputeMixin,
    ServingMixin,
    ValueHeadMixin,
)
from gruppo.types import (
    Finish,
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
    RecomputeMixin,
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
    action_name = "token"
    budget_name = "tokens"
    default_budgets = (TOKENS_ON_CPU, TOKENS)
    out_of_memory_hint = (
        "Set a lower --rollout.max-new-tokens, shorten the prompts, or train a smaller --model; "
        "--optim.token-budget cannot cut a row."
    )
    compute_dtype: torch.dtype = torch.float32
    is_recomputed = False
    """Whether the backward pass computes each layer's activations again."""
    forced_refreshes = 0
    """Refreshes after changes that versions of tensors may not show, as of a sync."""

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
        self.backbone = backbone
        self.chat = chat
        self.context = context
        self.chunk = chunk
        self.compute_in(compute_dtype)
        self.tools_of: ToolsOf = lambda prompt: ()
        self.value_head: nn.Module | None = None
        """Features [N, F] to values [N]; not part of ``module``, so that saves, copies and
        references lack it."""

    # --- weights ---

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the compute dtype, in place; the copy is made anew if one is needed."""
        self.compute_dtype = dtype
        is_copied = self._dtypes() != {dtype}
        self.copy = ComputeCopy(self.module, dtype) if is_copied else None
        module = self.module if self.copy is None else self.copy.module
        self.backbone = replace(self.backbone, module=module)

    def _dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.module.parameters() if p.is_floating_point()}

    def to(self, device: torch.device) -> None:
        self.module.to(device)
        self.compute_in(self.compute_dtype)

    @property
    def compute_module(self) -> nn.Module:
        return self.backbone.module

    def shard(self, apply: Callable[..., None]) -> None:
        """Shard the master weights; FSDP casts them where they are gathered, in place of a copy."""
        self.copy = None
        self.backbone = replace(self.backbone, module=self.module)
        is_cast = self._dtypes() != {self.compute_dtype}
        apply(self.module, compute_dtype=self.compute_dtype if is_cast else None)

    def recompute(self) -> None:
        self.is_recomputed = recompute_layers(self.module, self.compute_module)

    def at(self, module: nn.Module) -> TextPolicy:
        """Return this policy over other weights of the same kind, without a copy or value head: a
        reference."""
        other = copy.copy(self)
        other.module = module.eval()
        other.backbone = replace(self.backbone, module=module)
        other.copy = other.value_head = None
        return other

    def trunk(self) -> Any:
        """The part of the master weights that computes the features."""
        return self.module.base_model if self.backbone.splits else self.module

    @torch.no_grad()
    def feature_width(self) -> int:
        """Features at each position that a value head reads; the logits of a model that cannot be
        split."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        return self.backbone.features(ids).shape[-1]

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
            generation = getattr(module, "generation_config", None)
            if generation is not None and generation.temperature is not None:
                # some are published with a temperature and without do_sample: transformers loads
                # them, but cannot save them
                generation.do_sample = True
            module.save_pretrained(folder)
        self.chat.save(folder)

    # --- description and memory ---

    def describe(
        self, config: Any, sampling: Sampling, prompts: Sequence[Prompt], group_size: int
    ) -> list[str]:
        lengths = [len(self.encode(prompt)) for prompt in prompts]
        new = config.rollout.max_new_tokens
        rows = config.rollout.prompts * group_size
        how = "with every row" if self.backbone.is_padded else "once for its group"
        return [
            f"prompts     {sum(lengths) / len(lengths):.0f} tokens on average, at most "
            f"{max(lengths)}; measured on {counted(len(lengths), 'prompt')}; each is read {how}",
            f"sampled     at most {rows * new:,} tokens per step, {new} per row",
        ]

    def memory_estimate(
        self, config: Any, prompts: Sequence[Prompt], budget: int, group_size: int
    ) -> dict[str, float]:
        rows = max(min(BATCH_ROWS, config.rollout.prompts * config.rollout.group_size), group_size)
        return working_memory(self, config, self.longest_prompt(prompts), budget, rows)

    def bytes_per_unit(self) -> int:
        return activations(
            getattr(self.module, "config", None),
            1,
            self.compute_dtype,
            is_padded=self.backbone.is_padded,
            is_recomputed=self.is_recomputed,
        )

    def longest_prompt(self, prompts: Sequence[Prompt] | Rollouts) -> int:
        if isinstance(prompts, Rollouts):
            return max(map(len, prompts.shared["prompt_ids"]), default=0)
        return max((len(self.encode(prompt)) for prompt in prompts), default=0)

    # --- prompts ---

    def input_digests(self) -> dict[str, str | None]:
        return self.chat.digests()

    def configure_prompts(self, prompts: Any) -> None:
        self.chat.configure(prompts)

    def prepare_conversations(
        self, tools: Sequence[Mapping[str, Any]] | None, tools_of: ToolsOf | None = None
    ) -> None:
        self.chat.set_tools(tools or ())
        if not tools:
            self.tools_of = lambda prompt: ()
        else:
            self.tools_of = tools_of or (lambda prompt: self.chat.tools)

    def encode(self, prompt: Prompt) -> list[int]:
        return self.chat.encode(prompt.inputs, self.tools_of(prompt))

    def parse_prompt(self, text: str, *, is_plain: bool, read_image: Callable[..., Tensor]) -> Any:
        return [{"role": "user", "content": text}] if self.chat.can_chat and not is_plain else text

    def format_prompt(self, prompt: Prompt, *, is_target: bool = False) -> str:
        if not is_target:
            return repr(self.chat.text_with_specials(self.encode(prompt)))
        ids, _, _ = demonstrate(self.chat, prompt.inputs, prompt.target, self.tools_of(prompt))
        return f"{self.chat.text_with_specials(ids)!r}  ({len(ids)} tokens)"

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> str | None:
        if isinstance(prompt.inputs, str) and self.tools_of(prompt):
            return f"""prompt {prompt.id!r} is a string, and tools need a conversation. Give a list
                of messages, such as [{{"role": "user", "content": ...}}]."""
        new = sampling.max_actions
        if self.context is None or (tokens := len(self.encode(prompt))) + new <= self.context:
            return None
        return (
            f"prompt {prompt.id!r} has {tokens} tokens, and {new} new ones make {tokens + new}; "
            f"the model's context holds {self.context}. Shorten or remove it, or lower "
            f"--rollout.max-new-tokens."
        )

    # --- sampling ---

    def sample(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        generate: GenerateTokens | None = None,
    ) -> Rollouts:
        """Sample ``request.size`` completions of each prompt; randomness depends on (seed, draw,
        sample, position)."""
        generate, batch_rows = self._generator(generate)
        prompts: dict[tuple[str, int], Prompt] = {}
        batches: list[list[Request]] = [[]]
        for request in requests:
            prompt = request.prompt
            if why := self.check_prompt(prompt, sampling):
                raise GruppoError(why)
            if prompts.setdefault((prompt.id, prompt.draw), prompt).inputs != prompt.inputs:
                raise GruppoError(f"""two different prompts have the id {prompt.id!r} and the draw
                    {prompt.draw}. Give each prompt an id of its own.""")
            # a group stays whole: its rows share the keys of their prompt
            if batches[-1] and sum(r.size for r in batches[-1]) + request.size > batch_rows:
                batches.append([])
            batches[-1].append(request)
        parts = [self._sample_batch(generate, batch, sampling, seed) for batch in batches]
        return Rollouts.cat(parts)

    def _generator(self, generate: GenerateTokens | None) -> tuple[GenerateTokens, int]:
        """What samples tokens, and the most rows that it is called with: by default this policy."""
        if generate is not None:
            return generate, sys.maxsize
        self.refresh()
        return partial(generate_locally, self), BATCH_ROWS

    def _sample_batch(
        self, generate: GenerateTokens, requests: Sequence[Request], sampling: Sampling, seed: int
    ) -> Rollouts:
        prompts = [request.prompt for request in requests]
        owners = [owner for owner, request in enumerate(requests) for _ in range(request.size)]
        can_continue = any(request.has_more_turns for request in requests)
        batch = TokenBatch(
            prompts=tuple(torch.tensor(self.encode(prompt)) for prompt in prompts),
            owners=torch.tensor(owners),
            addresses=tuple((r.prompt.draw, r.first + i) for r in requests for i in range(r.size)),
            kept=(None,) * len(owners) if can_continue else None,
        )
        generated = generate(batch, sampling, seed)
        texts, completions = list[str](), list[Any]()
        for row, owner in enumerate(owners):
            prompt = prompts[owner]
            ids = generated.tokens[row, : int(generated.lengths[row])].tolist()
            texts.append(cut_at_stop(self.chat.text(ids), sampling.stop))
            tools = self.tools_of(prompt)
            answer = self.completion(ids, texts[-1], prompt.inputs, tools, sampling.stop)
            completions.append(answer)
        rollouts = _rollouts(prompts, batch.owners, batch.prompts, generated, completions, sampling)
        if self.chat.tools:  # a call of a tool is not in the message's content
            rollouts = replace(rollouts, per_row={**rollouts.per_row, "text": tuple(texts)})
        return rollouts

    def completion(
        self, ids: Sequence[int], text: str, inputs: Any, tools: Tools, stop: Sequence[str]
    ) -> Any:
        """What these sampled ids say, in the form of what they answer: a string or a list of one
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
        generate: GenerateTokens | None = None,
    ) -> Rollouts:
        """Append replies (a string or messages, by row) and a further turn of the policy; other
        rows stay as they are.

        A reply's tokens are columns whose mask is False. ``sampling.max_actions`` counts all tokens
        that the policy samples in a row. ``rollouts.per_row`` needs the entries that
        ``gruppo.environments.converse`` adds: "sample", the row's number in its group, "text", its
        last turn, "environment_failure", "context_full" and "reencoded". Histories are not read
        again where ``sample`` or the last call has kept their keys and values ("kept").
        """
        generate, batch_rows = self._generator(generate)
        rollouts, turns = next_turns(self, rollouts, replies, sampling, max_reply_tokens)
        for start in range(0, len(turns), batch_rows):
            batch = turns[start : start + batch_rows]
            rollouts = append_turns(self, generate, rollouts, batch, sampling, seed)
        return rollouts

    # --- serving ---

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        from torch.distributed.tensor import DTensor  # takes two seconds

        for name, tensor in self.module.state_dict().items():
            # one tensor of FSDP at a time
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield name, whole.to(self.compute_dtype) if whole.is_floating_point() else whole

    def served_config(self) -> dict[str, Any]:
        if self.backbone.is_plain:
            raise GruppoError(
                f"""a {type(self.module).__name__} of gruppo.from_module cannot be loaded by a
                    server; it needs to be a Hugging Face model""",
                advice="Leave $engine out",
            )
        module: Any = self.module
        dtype = str(self.compute_dtype).removeprefix("torch.")
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
        rows = loss_mask.any(dim=1).nonzero()[:, 0].tolist()
        prompts, is_padded = _prompt_lengths(rollouts), self.backbone.is_padded
        parts = split_rows(
            prompts, rollouts.lengths, rollouts.group_ids, rows, budget, is_padded=is_padded
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
            raise GruppoError("greedy rollouts (temperature 0) have no density. Sample at 1.")
        entropy: EntropyMode = "value" if "entropy_value" in outputs else "none"
        if "entropy" in outputs:
            entropy = "gradient"
        actions = micro_batch.of(rollouts.actions)
        features, row, column, place = self._action_features(rollouts, micro_batch)  # [N, F]
        logprobs, nats = chunked_categorical(
            features,
            self.backbone.head,
            actions[row, column].to(self.device, non_blocking=True),
            rollouts.temperature[rows][row].to(self.device, non_blocking=True),
            chunk=self.chunk,
            top_k=next(iter(rollouts.per_row["top_k"][rows].tolist()), 0),
            top_p=next(iter(rollouts.per_row["top_p"][rows].tolist()), 1.0),
            entropy=entropy,
        )
        values = self._values(features) if "values" in outputs else None
        return Likelihood(
            _scatter(logprobs, place, actions.shape),
            entropy=None if nats is None else _scatter(nats, place, actions.shape),
            values=None if values is None else _scatter(values, place, actions.shape),
        )

    def values(self, rollouts: Rollouts, micro_batch: MicroBatch) -> Float[Tensor, "B T"]:
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
        place = tuple(index.to(self.device, non_blocking=True) for index in (row, column))
        return features, row, column, place

    # --- demonstrations ---

    def check_demonstration(self, prompt: Prompt) -> str | None:
        try:
            ids, _, _ = demonstrate(self.chat, prompt.inputs, prompt.target, self.tools_of(prompt))
            tokens = len(self.encode(prompt)) + len(ids)
        except GruppoError as error:
            return f"prompt {prompt.id!r}: {error}"
        if not ids:
            return (
                f"prompt {prompt.id!r} has no target to learn from: it is {prompt.target!r}. Give "
                f"it one."
            )
        if self.context is None or tokens <= self.context:
            return None
        return (
            f"prompt {prompt.id!r} and its target have {tokens} tokens; the model's context holds "
            f"{self.context}. Shorten or remove it."
        )

    def demonstrations(self, prompts: Sequence[Prompt], *, seed: int) -> Rollouts:
        """Each prompt with its target as completion, as the policy would write and end it.

        A target may be a conversation: what the policy only reads there is not in ``mask``. There
        was no sampler: ``sampler_logprobs`` are 0.
        """
        for prompt in prompts:
            if why := self.check_demonstration(prompt):
                raise GruppoError(why)
        shown = [demonstrate(self.chat, p.inputs, p.target, self.tools_of(p)) for p in prompts]
        ids, masks, completions = zip(*shown, strict=True)
        actions, mask = (
            nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            for rows in (ids, masks)
        )
        finish: tuple[Finish, ...] = tuple("stop" for _ in prompts)
        generated = Generated(
            actions,
            logprobs=torch.zeros(actions.shape),
            lengths=torch.tensor([len(row) for row in ids]),
            finish=finish,
        )
        owners = torch.arange(len(prompts))
        prompt_ids = [torch.tensor(self.encode(prompt)) for prompt in prompts]
        rollouts = _rollouts(prompts, owners, prompt_ids, generated, completions, Sampling())
        return replace(rollouts, mask=mask)


def _prompt_lengths(rollouts: Rollouts) -> Int[Tensor, "B"]:
    return torch.tensor([len(ids) for ids in rollouts.shared["prompt_ids"]])[rollouts.group_ids]


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
    mask = torch.arange(columns) < generated.lengths[:, None]
    versions = 0 if generated.versions is None else generated.versions[:, :columns]
    per_row: dict[str, Any] = {
        "top_k": torch.full((rows,), sampling.top_k),
        "top_p": torch.full((rows,), sampling.top_p, dtype=torch.float64),
    }
    if generated.kept is not None:
        per_row["kept"] = generated.kept
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=owners,
        actions=generated.tokens[:, :columns],
        mask=mask,
        lengths=generated.lengths,
        completions=tuple(completions),
        sampler_logprobs=torch.where(mask, generated.logprobs[:, :columns], 0),
        policy_version=torch.where(mask, versions, 0),
        temperature=torch.full((rows,), float(sampling.temperature)),
        finish=generated.finish,
        shared={"prompt_ids": tuple(ids.cpu() for ids in prompt_ids)},
        per_row=per_row,
    )


def _scatter(
    values: Float[Tensor, "N"], place: tuple[Tensor, Tensor], shape: Sequence[int]
) -> Float[Tensor, "B T"]:
    """Put one value per action at its row and column, 0 elsewhere. A boolean mask would wait for
    the GPU."""
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_put(place, values)
