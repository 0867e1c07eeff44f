"""Small true parts: a byte tokenizer, a two-layer GPT, tiny Hugging Face models, and the policies
made of them."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gruppo.modalities.common.lora import adapter_weights, inject
from gruppo.modalities.text import TextPolicy, from_module, from_pretrained, from_transformers
from gruppo.modalities.text.backbones import Backbone
from gruppo.types import Prompt, Request, Rollouts

END = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ByteTokenizer:
    """A token is a byte; 256 ends a completion."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("<end>" if i == END else chr(i) if i < 128 else "\ufffd" for i in ids)


class TinyGPT(nn.Module):
    """Ids [B, T] to logits [B, T, V]: learned positions, causal attention, dropout where asked
    for."""

    def __init__(
        self, vocabulary: int = END + 1, width: int = 16, context: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 2


class Block(nn.Module):
    """One head of attention and a hidden layer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.dropout = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Dropout(dropout),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.dropout(self.mlp(x))


def bpe_tokenizer(merges: Sequence[tuple[str, str]] = (("a", "b"), ("ab", "c"), ("1", "2"))) -> Any:
    """A fast Hugging Face tokenizer over bytes with a few merges and a chat template; padding is
    the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    micro_batches = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(
        models.BPE({micro_batch: n for n, micro_batch in enumerate(micro_batches)}, list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
    )


MADE: dict[str, tuple[Any, Tensor]] = {}
"""Models by kind, seed and changes, with the state of torch's generator after each was made."""


def causal_lm(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny Hugging Face model of the given kind whose weights are large enough that attention
    matters."""
    key = f"{kind} {seed} {sorted(changes.items())}"
    if key not in MADE:
        module = _made(kind, seed, changes)
        MADE[key] = module, torch.get_rng_state()
    module, state = MADE[key]
    torch.set_rng_state(state)
    return copy.deepcopy(module)


def probed_once(kind: str, **changes: Any) -> Any:
    """The same, whose fast ways are found once a session (tests/memo.py)."""
    module = causal_lm(kind, **changes)
    module.loaded_from = f"{kind} {sorted(changes.items())}"
    return module


def _made(kind: str, seed: int, changes: dict[str, Any]) -> Any:
    import transformers

    tokenizer = bpe_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    defaults = sizes | heads | ends | {"initializer_range": 0.25} | changes
    if kind == "GPT2":
        defaults = {
            name: value
            for name, value in defaults.items()
            if name not in ("num_key_value_heads", "head_dim")
        }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**defaults)
    return getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(
        config
    )


# --- policies -------------------------------------------------------------------------------------


def plain(*, seed: int = 0, **changes: Any) -> TextPolicy:
    """A module of one's own."""
    torch.manual_seed(seed)
    return from_module(
        TinyGPT(**changes), ByteTokenizer(), eos_ids=[END], context=64, render=render
    )


def llama(**changes: Any) -> TextPolicy:
    """Rotary positions, grouped queries, embeddings tied."""
    return of("Llama", tie_word_embeddings=True, **changes)


def adapted(
    *, rank: int = 3, targets: Sequence[str] = (), compute: Any = "float32", **changes: Any
) -> TextPolicy:
    """A frozen Llama below an adapter that changes what it says."""
    adapt = functools.partial(
        inject, rank=rank, alpha=2.0 * rank, targets=targets, seed=0, base="tiny"
    )
    module = probed_once("Llama", tie_word_embeddings=True, **changes)
    policy = from_transformers(module, bpe_tokenizer(), compute=compute, adapt=adapt)
    return with_random_adapter(policy)


WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Whole blocks of 64 weights, as 4 bits need."""


@functools.cache
def wide_folder() -> str:
    """A model of such rows. Called before ranks meet: transformers writes on rank 0 alone."""
    folder = tempfile.mkdtemp(prefix="gruppo-wide-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    causal_lm("Llama", tie_word_embeddings=True, **WIDE).save_pretrained(folder)
    bpe_tokenizer().save_pretrained(folder)
    return folder


def four_bit(*, compute: Any = "float32") -> TextPolicy:
    """An adapter on a base in 4 bits, which needs bitsandbytes."""
    adapt = functools.partial(inject, rank=3, alpha=6.0, seed=0, base="tiny")
    return with_random_adapter(
        from_pretrained(wide_folder(), compute=compute, adapt=adapt, load_in_4bit=True)
    )


@torch.no_grad()
def with_random_adapter(policy: TextPolicy, scale: float = 0.3) -> TextPolicy:
    """No part of it 0, so that each counts."""
    generator = torch.Generator().manual_seed(7)
    for weight in adapter_weights(policy.module).values():
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    policy.refresh(force=True)
    return policy


def gpt2(**changes: Any) -> TextPolicy:
    """Learned absolute positions, dropout in the config."""
    return of("GPT2", **changes)


def qwen2(**changes: Any) -> TextPolicy:
    """Biases in attention."""
    return of("Qwen2", tie_word_embeddings=False, **changes)


def qwen3(**changes: Any) -> TextPolicy:
    """Norms on queries and keys, heads wider than the features divide into."""
    return of("Qwen3", tie_word_embeddings=False, **({"head_dim": 16} | changes))


def biased_llama(**changes: Any) -> TextPolicy:
    """Biases wherever the layout can have them."""
    policy = llama(attention_bias=True, mlp_bias=True, **changes)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return policy


def wide_mistral(**changes: Any) -> TextPolicy:
    """No sliding window."""
    return mistral(sliding_window=None, **changes)


def mistral(**changes: Any) -> TextPolicy:
    """A sliding window shorter than the rows."""
    return of("Mistral", **({"sliding_window": 6} | changes))


def gemma2(**changes: Any) -> TextPolicy:
    """Soft-capped logits; sliding and full attention in turn."""
    caps = {
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    }
    return of("Gemma2", **({"sliding_window": 6} | caps | changes))


def of(kind: str, *, compute: Any = "float32", **changes: Any) -> TextPolicy:
    """The policy of a tiny Hugging Face model."""
    return from_transformers(probed_once(kind, **changes), bpe_tokenizer(), compute=compute)


POLICIES: list[Callable[..., TextPolicy]] = [plain, llama, adapted, gpt2, qwen2, mistral, gemma2]
"""What every metamorphic test runs over: a new policy joins by one more name here."""
HUGGING_FACE = [llama, gpt2, qwen2, mistral, gemma2]
STREAMING = [llama, adapted, biased_llama, qwen2, qwen3, wide_mistral]
"""Their layers can be run one by one."""


def render(messages: Sequence[dict[str, str]]) -> list[int]:
    return ByteTokenizer().encode("".join(f"{m['role'][0]}:{m['content']};" for m in messages))


def doubled(policy: TextPolicy) -> TextPolicy:
    """The policy in float64 throughout, so that two roads to one number agree to many digits."""
    policy.module.double()
    policy.compute_dtype = torch.float64
    trunk = getattr(policy.module, "base_model", policy.module)
    for part in {policy.module, trunk, getattr(trunk, "rotary_emb", trunk)}:
        part.__class__ = in_float64(type(part))
    return policy


class Float64(TorchFunctionMode):
    """What is asked for in float32 comes in float64: norms, rotary angles and softmax of
    transformers ask for it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            return args[0].double()
        kwargs = {name: widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(widened, args), **kwargs)


def widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@functools.cache
def in_float64(kind: type[nn.Module]) -> type[nn.Module]:
    """The same kind of module, whose forward runs in float64 throughout; a hook would change how it
    is run."""

    class InFloat64(kind):
        @functools.wraps(kind.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with Float64():
                return super().forward(*args, **kwargs)

    return InFloat64


class LeftPadded(Backbone):
    """Rows that stand further right, each by another distance, with a mask and positions that say
    so."""

    def features(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        shift = 1 + torch.arange(b) % 3
        column = torch.arange(t + 3) - shift[:, None]  # [b, t + 3]: the column that stands there
        inside = (column >= 0) & (column < t)
        moved = torch.where(inside, ids.gather(1, column.clamp(0, t - 1)), 7)
        positions = column.clamp(min=0)
        network = self.module.base_model if self.splits else self.module
        output = network(
            input_ids=moved,
            attention_mask=(column >= 0).long(),
            position_ids=positions,
            use_cache=False,
        )
        features = output.last_hidden_state if self.splits else output.logits
        return features.gather(
            1, (torch.arange(t) + shift[:, None])[..., None].expand(-1, -1, features.shape[-1])
        )


def left_padded(policy: TextPolicy) -> TextPolicy:
    """The same policy over the same weights, reading rows that are padded on the left."""
    return _with_backbone(policy, LeftPadded)


def unpacked(policy: TextPolicy) -> TextPolicy:
    """The same policy over the same weights, reading each completion behind a prompt of its own."""
    return _with_backbone(policy, Backbone)


def _with_backbone(policy: TextPolicy, kind: type[Backbone]) -> TextPolicy:
    other, own = copy.copy(policy), policy.backbone
    assert not own.is_plain
    other.backbone = kind(own.module, splits=own.splits, caches=own.caches)
    return other


def ragged(rollouts: Rollouts) -> Rollouts:
    """The rollouts cut at unequal lengths; one has a column that the environment wrote."""
    given = torch.tensor([10, 3, 7, 1, 9, 5, 2, 8, 4]).repeat(len(rollouts) // 9 + 1)[
        : len(rollouts)
    ]
    lengths = torch.minimum(given, rollouts.lengths)
    mask = torch.arange(rollouts.mask.shape[1]) < lengths[:, None]
    mask[0, 1] = False
    logprobs = torch.where(mask, rollouts.sampler_logprobs, 0)
    return replace(rollouts, lengths=lengths, mask=mask, sampler_logprobs=logprobs)


def prompts(*inputs: Any) -> list[Prompt]:
    """Prompts with draws of their own; three of unequal lengths by default."""
    inputs = inputs or ("a", "what is 12+3?", [{"role": "user", "content": "abc"}])
    return [Prompt(f"p{n}", given, target=str(n), draw=n + 10) for n, given in enumerate(inputs)]


def requests(*sizes: int, of: Sequence[Prompt] | None = None) -> list[Request]:
    """One request for each size."""
    return [Request(prompt, size) for prompt, size in zip(of or prompts(), sizes, strict=False)]


class Says(nn.Module):
    """At every position the token that the script has for the next one: an off-by-one costs 50
    nats."""

    def __init__(self, *scripts: Sequence[int], vocabulary: int = END + 1) -> None:
        super().__init__()
        script = nn.utils.rnn.pad_sequence(
            [torch.tensor(list(s)) for s in scripts], batch_first=True
        )
        self.logits = nn.Parameter(
            50.0 * nn.functional.one_hot(script, vocabulary)
        )  # by (first token, position)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows follow the script that their first token numbers."""
        which = ids[:, 0] % len(self.logits)
        return nn.functional.pad(self.logits, (0, 0, 0, ids.shape[1]))[which, 1 : ids.shape[1] + 1]
