"""Decoding layer by layer: prompts held once for their group, products fused, rows that leave cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.decoder import Decoder, attend
from gruppo.modalities.text.layouts import Texts, stream

COLUMNS = 32
"""Tokens by which the buffers of the keys and values of sampled tokens grow."""
READ_AT_ONCE = 1024
"""Tokens of prompts read in one pass, so that activations stay in the processor's cache."""
SMALL = 1024
"""Rows times columns up to which products of keys are faster in float32 on a CPU, since they start sooner."""
Map = Callable[[Tensor], Tensor]


class LayeredDecoding:
    """Rows during sampling, run layer by layer.

    Rows are on a grid of groups [g, j]: one product for the queries of a group's rows and the keys of their prompt,
    and one for the keys that each row has sampled. Where groups have unequal numbers of rows, or some have left, cells
    of the grid are empty; only attention is computed there, everything else for the rows only.
    """

    logits: Float[Tensor, "N V"]
    columns = COLUMNS
    kept_frac = 0.75
    """Share of the grid at which rows are moved together."""
    begun = 0
    """Columns of the suffixes that earlier turns fill; each row ends at the last one (``kept.resume``)."""

    @torch.no_grad()
    def __init__(
        self,
        decoder: Decoder,
        head: nn.Module,
        prompts: Texts,
        owners: Int[Tensor, "N"],
        prefixes: Texts | None = None,
        fused: FusedDecoder | None = None,
    ) -> None:
        """``prefixes``: tokens that each row already has after its prompt; rows of equal prefixes are then a group."""
        self.use(fused or FusedDecoder(decoder, head))
        # what is read: (index of the prompt, tokens behind it), once for each group of the grid
        if prefixes is None:
            texts = [(n, prompt.new_zeros(0)) for n, prompt in enumerate(prompts)]
        else:
            whole = [(n, *ids.tolist()) for n, ids in zip(owners.tolist(), prefixes, strict=True)]
            places = {text: place for place, text in enumerate(dict.fromkeys(whole))}
            texts = [(text[0], prefixes[whole.index(text)]) for text in places]
            owners = torch.tensor([places[text] for text in whole], device=owners.device)
        lengths = [len(prompts[n]) + len(prefix) for n, prefix in texts]
        self.lengths = torch.tensor(lengths, device=owners.device)
        self.written = 0
        self.starts, self.names = torch.zeros_like(owners), list(range(len(lengths)))
        self._lay_out(owners)
        self.prompts = self._empty(len(lengths), max(lengths))
        self.logits = self.head(self._read(prompts, texts))[owners]
        self.suffixes = self._empty(self.groups * self.width, self.columns)

    def use(self, fused_decoder: FusedDecoder) -> None:
        self.fused = fused_decoder
        self.decoder, self.blocks = fused_decoder.decoder, fused_decoder.blocks
        self.norm, self.head = fused_decoder.norm, fused_decoder.head
        self.dtype: torch.dtype = next(self.decoder.embed.parameters()).dtype
        self.exact = torch.promote_types(self.dtype, torch.float32)
        self.kept_prompts: dict[int, list[Tensor]] = {}
        """Of each layer, by the name of a group: keys and values of its prompt that rows hold between turns."""

    # --- rows on the grid ---

    def _lay_out(self, owners: Int[Tensor, "N"]) -> None:
        """Assign one cell to each row, those of a group side by side."""
        self.owners = owners
        self.groups = len(self.lengths)
        order = owners.argsort(stable=True)
        sizes = owners.bincount(minlength=self.groups)
        self.width = int(sizes.max())
        rank = torch.empty_like(owners)
        rank[order] = (
            torch.arange(len(owners), device=owners.device)
            - (sizes.cumsum(0) - sizes)[owners[order]]
        )
        self._place(owners * self.width + rank)
        padding = (
            torch.arange(int(self.lengths.max()), device=owners.device) >= self.lengths[:, None]
        )
        self.padding = padding[:, None, None, None] if padding.any() else None  # [g, 1, 1, 1, P]
        self.first = torch.zeros(self.groups * self.width, dtype=torch.long, device=owners.device)
        self.first[self.home] = self.starts  # column of each cell's first token after the prompt
        unused = torch.arange(self.begun, device=owners.device) < self.first[:, None]
        self.unused = (
            unused.view(self.groups, 1, self.width, 1, -1) if unused.any() else None
        )  # [g, 1, j, 1, begun]

    def _place(self, home: Int[Tensor, "N"]) -> None:
        self.home = home
        self.rows = torch.zeros(self.groups * self.width, dtype=torch.long, device=home.device)
        self.rows[home] = torch.arange(len(home), device=home.device)
        self.is_full = torch.equal(home, torch.arange(len(self.rows), device=home.device))

    def _empty(self, batch: int, columns: int) -> list[Tensor]:
        """Allocate keys and values [2, batch x kv heads, columns, D] of each layer."""
        shape, dtype = (
            (2, batch * self.decoder.kv_heads, columns, self.decoder.head_dim),
            self._dtype_for(columns),
        )
        return [torch.zeros(shape, dtype=dtype, device=self.owners.device) for _ in self.blocks]

    def _dtype_for(self, columns: int) -> torch.dtype:
        is_small = self.groups * self.width * columns <= SMALL
        return self.exact if is_small and self.owners.device.type == "cpu" else self.dtype

    def select(self, slots: Int[Tensor, "n"]) -> None:
        """Continue with these rows, each named once; buffers are copied when enough of the grid is empty."""
        self.logits = self.logits[slots]
        home, owners, self.starts = self.home[slots], self.owners[slots], self.starts[slots]
        if len(slots) > self.kept_frac * self.groups * self.width:
            self.owners = owners
            self._place(home)
            return
        old_width = self.width
        kept, owners = owners.unique(return_inverse=True)
        self.lengths, self.names = self.lengths[kept], [self.names[n] for n in kept.tolist()]
        self._lay_out(owners)
        longest = int(self.lengths.max())
        kv_heads = self.decoder.kv_heads
        heads = torch.arange(kv_heads, device=home.device)[:, None]
        self.prompts = self._moved(
            self.prompts, (kept * kv_heads + heads).T.flatten(), longest, longest
        )
        cells = home[self.rows].view(self.groups, 1, self.width)
        places = (
            cells // old_width * kv_heads + heads
        ) * old_width + cells % old_width  # [g, K, j]
        self.suffixes = self._moved(
            self.suffixes, places.flatten(), self.suffixes[0].shape[2], self.written
        )

    def _moved(
        self, buffers: list[Tensor], places: Tensor | None, columns: int, used: int
    ) -> list[Tensor]:
        """The buffers at these places, or at all; one layer at a time, so that only one layer is in memory twice."""
        dtype = self._dtype_for(columns)
        for n, old in enumerate(buffers):
            old = old[:, :, :used] if places is None else old[:, :, :used].index_select(1, places)
            buffers[n] = old
            if old.shape[2] != columns or old.dtype != dtype:
                buffers[n] = old.new_zeros(2, old.shape[1], columns, old.shape[3], dtype=dtype)
                buffers[n][:, :, :used] = old
        return buffers

    # --- rows that are kept for their next turn (``kept.Keeper``) ---

    def kept_bytes(self, slot: int, tokens: int) -> int:
        """Memory that ``keep`` takes: of this row's tokens, and of its group's prompt if no other row has kept it."""
        group = int(self.home[slot]) // self.width
        count = self.begun + tokens - int(self.starts[slot])
        count += 0 if self.names[group] in self.kept_prompts else int(self.lengths[group])
        return count * sum(
            2 * self.decoder.kv_heads * x.shape[-1] * x.element_size() for x in self.suffixes
        )

    def keep(self, slot: int, tokens: int) -> tuple[FusedDecoder, list[Tensor], list[Tensor]]:
        """Copy keys and values of a row up to its sampled token number ``tokens``: fields of a ``KeptRow``."""
        kv_heads = self.decoder.kv_heads
        group, column = divmod(int(self.home[slot]), self.width)
        if self.names[group] not in self.kept_prompts:
            heads, length = (
                slice(group * kv_heads, (group + 1) * kv_heads),
                int(self.lengths[group]),
            )
            self.kept_prompts[self.names[group]] = [
                x[:, heads, :length].clone() for x in self.prompts
            ]
        columns, shape = (
            slice(int(self.starts[slot]), self.begun + tokens),
            (2, self.groups, kv_heads, self.width),
        )
        suffix = [
            x.view(*shape, *x.shape[2:])[:, group, :, column, columns].clone()
            for x in self.suffixes
        ]
        return self.fused, self.kept_prompts[self.names[group]], suffix

    # --- reading the prompts ---

    def _read(self, prompts: Texts, texts: Sequence[tuple[int, Tensor]]) -> Float[Tensor, "g F"]:
        """Features of the last token of each text. Its keys and values are kept; each prompt is read once."""
        runs, total = list[list[int]](), 0  # texts that are read in one pass
        order = sorted(range(len(texts)), key=lambda n: texts[n][0])
        for prompt, members in groupby(order, key=lambda n: texts[n][0]):
            group = list(members)
            size = len(prompts[prompt]) + sum(len(texts[n][1]) for n in group)
            if not runs or total + size > READ_AT_ONCE:
                runs.append([])
                total = 0
            runs[-1] += group
            total += size
        kv_heads, last = self.decoder.kv_heads, []
        for run in runs:
            # a stream leaves the last token of a row out
            completions = [
                torch.cat([texts[n][1].cpu(), torch.zeros(1, dtype=torch.long)]) for n in run
            ]
            used, owners = torch.tensor([texts[n][0] for n in run]).unique(return_inverse=True)
            tokens = stream(
                [prompts[prompt].cpu() for prompt in used.tolist()], completions, owners
            )
            kept = []  # row of the buffers, its columns, and the tokens that they store
            for n, start, end in zip(
                run, tokens.start.tolist(), tokens.prompt_end.tolist(), strict=True
            ):
                (prompt, prefix), at = texts[n], slice(n * kv_heads, (n + 1) * kv_heads)
                length = len(prompts[prompt])
                kept.append((at, slice(0, length), slice(end + 1 - length, end + 1)))
                kept.append(
                    (at, slice(length, length + len(prefix)), slice(start, start + len(prefix)))
                )
            tokens = tokens.to(self.owners.device, self.exact)
            x = self.decoder.embed(tokens.ids)  # [N, F]
            turns = self._turns(x, tokens.positions)
            for block, buffer in zip(self.blocks, self.prompts, strict=True):
                q, k, v = block.rotate(block.qkv(block.attention_norm(x)), turns)
                q, k = (q * block.scale).to(self.dtype), k.to(self.dtype)
                for at, columns, part in kept:
                    buffer[0, at, columns], buffer[1, at, columns] = (
                        k[part].transpose(0, 1),
                        v[part].transpose(0, 1),
                    )
                x = block.finish(x, attend(q, k, v, tokens.blocks).flatten(1))
            ends = tokens.before(
                torch.arange(len(run)), torch.tensor([len(texts[n][1]) for n in run])
            )
            last.append(x[ends.to(x.device)])
        return self.norm(torch.cat(last)[torch.tensor(order).argsort().to(self.owners.device)])

    def _turns(self, like: Tensor, positions: Int[Tensor, "N"]) -> Complex[Tensor, "N 1 d"]:
        """Rotations of the two halves of a head, as complex numbers."""
        half = self.decoder.head_dim // 2
        cos, sin = self.decoder.rotary(like.to(self.exact), positions[None])
        return torch.complex(
            cos[0, :, None, :half].to(self.exact), sin[0, :, None, :half].to(self.exact)
        )

    # --- writing ---

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        if self.written == self.suffixes[0].shape[2]:
            self.suffixes = self._moved(
                self.suffixes, None, self.written + self.columns, self.written
            )
        x = self.decoder.embed(tokens)
        turns = self._turns(x, (self.lengths[self.owners] + self.written - self.starts)[self.rows])
        for block, prompt, suffix in zip(self.blocks, self.prompts, self.suffixes, strict=True):
            qkv = block.qkv(block.attention_norm(x))
            q, k, v = block.rotate(qkv if self.is_full else qkv.index_select(0, self.rows), turns)
            attended = self._attend(q, k, v, prompt, suffix, block.scale)
            x = block.finish(x, attended if self.is_full else attended.index_select(0, self.home))
        self.written += 1
        self.logits = self.head(self.norm(x))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, prompt: Tensor, suffix: Tensor, scale: float
    ) -> Tensor:
        """Over [the group's prompt | the tokens that the row has sampled], with one softmax over both: [cells, H D].

        q [cells, H, D], k and v [cells, K, D]; keys and values of prompts [2, g K, P, D] and suffixes [2, c K, T, D].
        """
        g, j, kv_heads, dim = self.groups, self.width, self.decoder.kv_heads, self.decoder.head_dim
        rep = self.decoder.heads // kv_heads
        now = suffix.view(2, g, kv_heads, j, -1, dim)[:, :, :, :, self.written]
        now[0].copy_(k.view(g, j, kv_heads, dim).transpose(1, 2))
        now[1].copy_(v.view(g, j, kv_heads, dim).transpose(1, 2))
        scaled = q.new_empty(g, kv_heads, j, rep, dim)
        torch.mul(q.view(g, j, kv_heads, rep, dim).transpose(1, 2), scale, out=scaled)

        seen = self.written + 1
        # bmm in low precision would copy keys that are not contiguous, so there it runs over the empty columns too
        reach = seen if suffix.dtype == self.exact else suffix.shape[2]
        to_prompt = torch.bmm(
            scaled.view(g * kv_heads, j * rep, dim).to(prompt.dtype), prompt[0].mT
        )
        to_suffix = torch.bmm(scaled.view(-1, rep, dim).to(suffix.dtype), suffix[0, :, :reach].mT)
        columns = prompt.shape[2]
        scores = torch.cat([to_prompt.view(-1, rep, columns), to_suffix[:, :, :seen]], dim=-1).to(
            self.exact
        )
        if self.padding is not None:
            scores.view(g, kv_heads, j, rep, -1)[..., :columns].masked_fill_(
                self.padding, -torch.inf
            )
        if self.unused is not None:
            begun = scores.view(g, kv_heads, j, rep, -1)[..., columns : columns + self.begun]
            begun.masked_fill_(self.unused, -torch.inf)
        of_prompt, of_suffix = scores.softmax(dim=-1).split([columns, seen], dim=-1)
        if reach > seen:
            of_suffix = F.pad(of_suffix, (0, reach - seen))
        first = torch.bmm(
            of_prompt.reshape(g * kv_heads, j * rep, columns).to(prompt.dtype), prompt[1]
        )
        second = torch.bmm(of_suffix.to(suffix.dtype), suffix[1, :, :reach])
        attended = torch.empty(g, j, kv_heads, rep, dim, dtype=self.dtype, device=q.device)
        torch.add(
            *(part.view(g, kv_heads, j, rep, dim).transpose(1, 2) for part in (first, second)),
            out=attended,
        )
        return attended.view(g * j, -1)


# --- layers as few, fast operations: fused products of weights in the processor's own layout --------------------------


class FusedDecoder:
    """All layers of a decoder, its last norm and its head; copies of weights in them do not follow the weights."""

    def __init__(self, decoder: Decoder, head: nn.Module) -> None:
        self.decoder = decoder
        self.blocks = [FusedLayer(layer, decoder) for layer in decoder.layers]
        self.norm, self.head = lean_norm(decoder.norm), fused(head)


class FusedLayer:
    """One layer without its attention, which the caller computes.

    On a CPU with the operation, plain ``nn.Linear`` products are fused: q, k, v in one, gate and up in another, over
    copies of the weights in the processor's layout. 1.3 times as fast at 32 rows, 1.6 at 2. The copies take as much
    memory as the weights and do not follow them. An adapter adds two small products. Other modules are called as usual.
    """

    def __init__(self, layer: Any, decoder: Decoder) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.scale = attention.scaling
        self.kv_heads, self.head_dim = decoder.kv_heads, decoder.head_dim
        self.q_norm, self.k_norm = (
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        )
        self.attention_norm, self.mlp_norm = (
            lean_norm(layer.input_layernorm),
            lean_norm(layer.post_attention_layernorm),
        )
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o, self.down = fused(attention.o_proj), fused(mlp.down_proj)
        self.gate_up = fused(mlp.gate_proj, mlp.up_proj)
        self.act = mlp.act_fn

    def rotate(
        self, qkv: Float[Tensor, "N A"], turns: Complex[Tensor, "N 1 d"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, D] and keys [N, K, D], in float32 at least, and the values [N, K, D].

        Rotated pairs come out adjacent: scores do not depend on the order of the elements of a head.
        """
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                [self.q_norm(qk[:, : -self.kv_heads]), self.k_norm(qk[:, -self.kv_heads :])], dim=1
            )
        first, second = qk.to(turns.real.dtype).chunk(2, dim=-1)
        qk = torch.view_as_real(torch.complex(first, second).mul_(turns)).flatten(-2)
        return qk[:, : -self.kv_heads], qk[:, -self.kv_heads :], v

    def finish(
        self, x: Float[Tensor, "N F"], attended: Float[Tensor, "N B"]
    ) -> Float[Tensor, "N F"]:
        """The output of the layer, given the output of its attention."""
        x = self.o(attended).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)


def lean_norm(module: Any) -> Map:
    """The RMS norm of the module as one operation if it gives the same numbers, else the module itself."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or has_hooks(module):
        return module
    norm = partial(F.rms_norm, normalized_shape=weight.shape, weight=weight.detach(), eps=eps)
    x = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    return norm if _is_close(norm(x), module(x).detach()) else module


def fused(*modules: Any) -> Map:
    """A function that concatenates the outputs of the modules for one input."""
    parts = [low_rank(module) for module in modules]
    linears = [
        part.base if isinstance(part, LowRank) else part for part in parts if part is not None
    ]
    if (
        len(linears) < len(modules)
        or linears[0].weight.device.type != "cpu"
        or not _packs(linears[0].weight.dtype)
    ):
        return (
            modules[0]
            if len(modules) == 1
            else lambda x: torch.cat([module(x) for module in modules], dim=-1)
        )
    weights, biases = (
        [linear.weight.detach() for linear in linears],
        [linear.bias for linear in linears],
    )
    bias = None
    if any(b is not None for b in biases):
        pairs = zip(weights, biases, strict=True)
        bias = torch.cat(
            [weight.new_zeros(len(weight)) if b is None else b.detach() for weight, b in pairs]
        )
    product = _packed(torch.cat(weights) if len(weights) > 1 else weights[0], bias)
    adapters = [part for part in parts if isinstance(part, LowRank)]
    if not adapters:
        return product
    # W x + B A x of all parts: all A in one product, and all B, scaled, as a block diagonal in another
    shrink = _packed(torch.cat([part.a.detach() for part in adapters]))
    blocks = [
        part.scale * part.b.detach()
        if isinstance(part, LowRank)
        else weight.new_zeros(len(weight), 0)
        for part, weight in zip(parts, weights, strict=True)
    ]
    widen = _packed(torch.block_diag(*blocks))
    return lambda x: product(x).add_(widen(shrink(x)))


def _packed(weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None) -> Map:
    """x W^T + b with W in the processor's layout, by private operations of PyTorch."""
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight.default(
        weight, 32
    )  # the layout fits any number of rows
    return lambda x: product(x, packed, bias, "none", [], "")


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether the operations for packed weights exist here and are right."""
    linear = nn.utils.skip_init(
        nn.Linear, 48, 80, dtype=dtype
    )  # without using the global generator
    x = torch.linspace(-1, 1, 3 * 48, dtype=dtype).view(3, 48)
    try:
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.arange(parameter.numel()).sin().view_as(parameter))
            is_packable = dtype in (torch.bfloat16, torch.float32)
            return is_packable and _is_close(_packed(linear.weight, linear.bias)(x), linear(x))
    except (AttributeError, RuntimeError):
        return False


def _is_close(got: Tensor, needed: Tensor) -> bool:
    scale = float(needed.abs().max()) * torch.finfo(needed.dtype).eps
    return got.shape == needed.shape and float((got - needed).abs().max()) <= 8 * scale
