"""Decoding layer by layer: prompts held once for their group, products fused, rows that leave cost
nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.decoder import Decoder, attend, embedded, rotate
from gruppo.modalities.text.layouts import Texts, attention_blocks, stream

COLUMNS = 32
"""Tokens by which the buffers of the keys and values of sampled tokens grow."""
READ_AT_ONCE = 1024
"""Tokens read in one pass, so that activations stay in the processor's cache."""
SMALL = 1024
"""Rows times columns up to which products of keys are faster in float32 on a CPU, since they start
sooner."""
Map = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class KeptRow:
    """Keys and values of a row between two turns; the decoding that continues the row takes their
    memory."""

    ids: Int[Tensor, "L"]
    """Tokens that have been read, prompt included."""
    weights: Any
    """Identifies the weights under which they were read."""
    fused: FusedDecoder
    prompt: list[Tensor]
    """Of each layer, [2, K, P, D]; one list for all rows of a group."""
    suffix: list[Tensor]
    """Of each layer, what follows the prompt, [2, K, h, D]. Empty once a decoding has taken it."""

    def fits(self, ids: Int[Tensor, "T"], weights: Any) -> bool:
        """Whether a row of these tokens can continue from here: equal weights, and a token left to
        read."""
        count = len(self.ids)
        is_prefix = count < len(ids) and torch.equal(ids[:count], self.ids)
        return is_prefix and self.weights == weights and bool(self.suffix)


class LayeredDecoding:
    """Rows during sampling, run layer by layer.

    Rows are slots of a grid of groups [g, j]: one product for the queries of a group's rows and the
    keys of their prompt, and one for the keys that each row has after it. If groups have unequal
    numbers of rows, or some have left, slots of the grid are empty; only attention is computed
    there, everything else for the rows only.
    """

    logits: Float[Tensor, "N V"]
    columns = COLUMNS
    min_used_frac = 0.75
    """Share of the grid that rows need to fill, or they are moved together."""
    room = 0
    """Bytes of rows that ``keep`` may still copy."""

    @torch.no_grad()
    def __init__(
        self,
        fused: FusedDecoder,
        prompts: Texts,
        owners: Int[Tensor, "N"],
        prefixes: Texts | None = None,
        kept: Sequence[KeptRow | None] = (),
    ) -> None:
        """Read each prompt, and behind it the ``prefixes`` of its rows, of which those ``kept``
        hold a part.

        All rows end at the same column of the suffixes, so that all write the next one; columns
        before a row's first token are masked.
        """
        self.fused = fused
        self.decoder = fused.decoder
        self.dtype: torch.dtype = next(self.decoder.embed.parameters()).dtype
        self.exact = torch.promote_types(self.dtype, torch.float32)
        device = owners.device
        ends = [0] * len(owners) if prefixes is None else [len(ids) for ids in prefixes]
        self.prefix_len = self.written = max(ends)
        self.starts = self.prefix_len - torch.tensor(ends, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.kept_prompts: list[list[Tensor] | None] = [None] * len(prompts)
        """Of each group, keys and values of its prompt that rows hold between turns, by layer."""
        for owner, row in zip(owners.tolist(), kept, strict=False):
            if row is not None:
                self.kept_prompts[owner] = row.prompt
        self._lay_out(owners)
        self.prompts = self._buffers((), int(self.lengths.max()))  # [2, g, K, P, D]
        features = self._read_prompts(prompts)
        self.suffixes = self._buffers((self.width,), self.prefix_len + self.columns)
        if prefixes is None:
            self.logits = fused.head(features)[owners]
        else:
            counts = self._fill(kept)
            unread = [ids[count:] for ids, count in zip(prefixes, counts, strict=True)]
            self.logits = self._read_prefixes(unread)

    # --- rows on the grid ---

    def _lay_out(self, owners: Int[Tensor, "N"]) -> None:
        """Assign one slot to each row, those of a group side by side."""
        device = owners.device
        self.groups = len(self.lengths)
        sizes = owners.bincount(minlength=self.groups)
        self.width = int(sizes.max())
        order = owners.argsort(stable=True)
        rank = torch.empty_like(owners)
        index = torch.arange(len(owners), device=device)
        rank[order] = index - (sizes.cumsum(0) - sizes)[owners[order]]
        self._place(owners * self.width + rank)
        columns = torch.arange(int(self.lengths.max()), device=device)
        padding = columns >= self.lengths[:, None]
        self.padding = padding.view(self.groups, 1, 1, 1, 1, -1) if padding.any() else None
        # column of each slot's first token after the prompt, and the position of column 0
        self.first = torch.zeros(self.groups * self.width, dtype=torch.long, device=device)
        self.first[self.slot_of_row] = self.starts
        self.offset = self.lengths.repeat_interleave(self.width) - self.first
        unused = torch.arange(self.prefix_len, device=device) < self.first[:, None]
        unused = unused.view(self.groups, 1, self.width, 1, 1, -1)
        self.unused = unused if unused.any() else None

    def _place(self, slot_of_row: Int[Tensor, "N"]) -> None:
        self.slot_of_row = slot_of_row
        slots = torch.arange(self.groups * self.width, device=slot_of_row.device)
        self.is_full = torch.equal(slot_of_row, slots)

    def _buffers(self, rows: tuple[int, ...], columns: int) -> list[Tensor]:
        """Allocate keys and values [2, g, K, *rows, columns, D] of each layer."""
        shape = (2, self.groups, self.decoder.kv_heads, *rows, columns, self.decoder.head_dim)
        dtype, device = self._dtype_for(columns), self.lengths.device
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in self.fused.layers]

    def _dtype_for(self, columns: int) -> torch.dtype:
        is_small = self.groups * self.width * columns <= SMALL
        return self.exact if is_small and self.lengths.device.type == "cpu" else self.dtype

    def select(self, rows: Int[Tensor, "n"]) -> None:
        """Continue with these rows, each named once; buffers are copied when enough of the grid is
        empty."""
        self.logits = self.logits[rows]
        self.starts = self.starts[rows]
        slots = self.slot_of_row[rows]
        if len(rows) > self.min_used_frac * self.groups * self.width:
            self._place(slots)
            return
        kv_heads, width = self.decoder.kv_heads, self.width
        kept, owners = (slots // width).unique(return_inverse=True)
        self.lengths = self.lengths[kept]
        self.kept_prompts = [self.kept_prompts[group] for group in kept.tolist()]
        self._lay_out(owners)
        longest = int(self.lengths.max())
        self._resize(self.prompts, lambda old: old.index_select(1, kept), longest, longest)
        source = torch.zeros_like(self.first)  # of each new slot, an empty one from any
        source[self.slot_of_row] = slots
        source = source.view(self.groups, 1, self.width)
        heads = torch.arange(kv_heads, device=slots.device)[:, None]
        # [g, K, j]
        places = ((source // width * kv_heads + heads) * width + source % width).flatten()
        shape = (2, self.groups, kv_heads, self.width)
        self._resize(
            self.suffixes,
            lambda old: old.flatten(1, 3).index_select(1, places).view(*shape, *old.shape[4:]),
            self.suffixes[0].shape[-2],
            self.written,
        )

    def _resize(self, buffers: list[Tensor], pick: Map, columns: int, used: int) -> None:
        """Move what is picked to buffers of other sizes; only one layer is in memory twice at a
        time."""
        dtype = self._dtype_for(columns)
        for n, old in enumerate(buffers):
            old = pick(old[..., :used, :])
            if old.shape[-2] != columns or old.dtype != dtype:
                new = old.new_zeros(*old.shape[:-2], columns, old.shape[-1], dtype=dtype)
                new[..., :used, :] = old
                old = new
            buffers[n] = old

    # --- rows that are kept for their next turn ---

    def keep(self, row: int, count: int, ids: Int[Tensor, "L"], weights: Any) -> KeptRow | None:
        """Copy keys and values of a row up to its sampled token number ``count``, if there is room;
        ``ids``: all up to there."""
        group, member = divmod(int(self.slot_of_row[row]), self.width)
        columns = slice(int(self.starts[row]), self.prefix_len + count)
        suffix = [x[:, group, :, member, columns] for x in self.suffixes]
        prompt = self.kept_prompts[group]
        new = [x[:, group, :, : int(self.lengths[group])] for x in self.prompts if prompt is None]
        needed = sum(x.nbytes for x in (*suffix, *new))
        if needed > self.room:
            return None
        self.room -= needed
        prompt = prompt or [x.clone() for x in new]
        self.kept_prompts[group] = prompt
        return KeptRow(ids, weights, self.fused, prompt, [x.clone() for x in suffix])

    def _fill(self, kept: Sequence[KeptRow | None]) -> list[int]:
        """Move keys and values of kept rows to the suffixes; return how many tokens of each row
        they hold."""
        counts = [0] * len(self.slot_of_row)
        for n, row in enumerate(kept):
            if row is None:
                continue
            counts[n] = row.suffix[0].shape[2]
            group, member = divmod(int(self.slot_of_row[n]), self.width)
            start = int(self.starts[n])
            for buffer, suffix in zip(self.suffixes, row.suffix, strict=True):
                buffer[:, group, :, member, start : start + counts[n]] = suffix
            row.suffix = []
        return counts

    # --- reading ---

    def _read_prompts(self, prompts: Texts) -> Float[Tensor, "n F"]:
        """Features of the last tokens of the prompts that are not kept; keys and values of all are
        stored."""
        runs: list[list[int]] = [[]]  # prompts that are read in one pass
        for n, prompt in enumerate(prompts):
            if (kept := self.kept_prompts[n]) is not None:
                for buffer, keys in zip(self.prompts, kept, strict=True):
                    buffer[:, n, :, : len(prompt)] = keys
                continue
            total = sum(len(prompts[other]) for other in runs[-1])
            if runs[-1] and total + len(prompt) > READ_AT_ONCE:
                runs.append([])
            runs[-1].append(n)
        last = [self._read_run(prompts, run) for run in runs if run]
        return self.fused.norm(torch.cat(last)) if last else self.prompts[0].new_empty(0)

    def _read_run(self, prompts: Texts, run: Sequence[int]) -> Float[Tensor, "n F"]:
        none = torch.zeros(0, dtype=torch.long)
        tokens = stream([prompts[n].cpu() for n in run], (), none)
        x, cos, sin = embedded(self.decoder, tokens.ids, tokens.positions)
        blocks = attention_blocks(tokens, x.device, self.exact)
        ends = torch.tensor([len(prompts[n]) for n in run]).cumsum(0)
        for layer, buffer in zip(self.fused.layers, self.prompts, strict=True):
            q, k, v = layer.rotated(layer.qkv(layer.attention_norm(x)), cos, sin)
            q, k = (q * layer.scale).to(self.dtype), k.to(self.dtype)
            stored = torch.stack([k, v]).transpose(1, 2)  # [2, K, N, D]
            for n, end in zip(run, ends.tolist(), strict=True):
                length = len(prompts[n])
                buffer[:, n, :, :length] = stored[:, :, end - length : end]
            x = layer.finish(x, attend(q, k, v, blocks).flatten(1))
        return x[ends.to(x.device) - 1]

    def _read_prefixes(self, unread: Texts) -> Float[Tensor, "N V"]:
        """Read the last tokens of each row, which end at column ``prefix_len``; logits after the
        last one.

        Products of weights are computed for these tokens only, attention for a rectangle of columns
        of all slots.
        """
        at_once = max(1, READ_AT_ONCE // len(self.first))  # columns in one pass
        tokens = torch.cat(list(unread))
        device = tokens.device
        counts = torch.tensor([len(ids) for ids in unread], device=device)
        slot = self.slot_of_row.repeat_interleave(counts)
        columns = [torch.arange(self.prefix_len - len(ids), self.prefix_len) for ids in unread]
        column = torch.cat(columns).to(device)
        for start in range(self.prefix_len - int(counts.max()), self.prefix_len, at_once):
            stop = min(start + at_once, self.prefix_len)
            is_now = (column >= start) & (column < stop)
            at, slots = column[is_now], slot[is_now]
            seen = torch.arange(stop, device=device)
            # columns before the row's first token, and those after the query
            hidden = (seen < self.first[:, None, None]) | (seen > seen[start:, None])
            hidden = hidden.view(self.groups, 1, self.width, 1, stop - start, stop)
            place = slots * (stop - start) + at - start
            x = self._forward(tokens[is_now], slots, at, place, hidden, stop)
        # the last pass holds the last token of every row
        return self.fused.head(x[at == self.prefix_len - 1])

    # --- sampling ---

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        """Append one token to each row."""
        self._grow()
        column = torch.tensor([self.written], device=tokens.device)
        place = None if self.is_full else self.slot_of_row
        x = self._forward(tokens, self.slot_of_row, column, place, self.unused, self.written + 1)
        self.logits = self.fused.head(x)
        self.written += 1

    def _grow(self) -> None:
        """Make room for the next column."""
        if self.written == self.suffixes[0].shape[-2]:
            self._resize(self.suffixes, lambda old: old, self.written + self.columns, self.written)

    def _forward(
        self,
        tokens: Int[Tensor, "n"],
        slot: Int[Tensor, "n"],
        column: Int[Tensor, "n"],
        place: Int[Tensor, "n"] | None,
        hidden: Bool[Tensor, "g 1 j 1 C t"] | None,
        seen: int,
    ) -> Float[Tensor, "n F"]:
        """Features of tokens that are written to these columns of the suffixes.

        ``place``: index of each token over [g j, C] slots and the columns of this pass; None if the
        tokens are one for each slot. ``seen``: columns that exist; ``hidden``: those of them that a
        query does not see.
        """
        g, j, kv_heads = self.groups, self.width, self.decoder.kv_heads
        count = 1 if hidden is None else hidden.shape[-2]
        group, member = slot // j, slot % j
        x, cos, sin = embedded(self.decoder, tokens, self.offset[slot] + column)
        for layer, prompt, suffix in zip(
            self.fused.layers, self.prompts, self.suffixes, strict=True
        ):
            q, k, v = layer.rotated(layer.qkv(layer.attention_norm(x)), cos, sin)
            for stored, new in zip(suffix, (k, v), strict=True):
                stored[group, :, member, column] = new.to(suffix.dtype)
            queries = q * layer.scale
            if place is not None:
                grid = q.new_zeros(g * j * count, *q.shape[1:])
                queries = grid.index_copy_(0, place, queries)
            queries = queries.view(g, j, count, kv_heads, -1, q.shape[-1])
            queries = queries.permute(0, 3, 1, 4, 2, 5).contiguous()  # [g, K, j, r, C, D]
            attended = self._attend(queries, prompt, suffix, seen, hidden)
            attended = attended.permute(0, 2, 4, 1, 3, 5).reshape(g * j * count, -1)
            attended = attended.to(self.dtype)
            x = layer.finish(x, attended if place is None else attended.index_select(0, place))
        return self.fused.norm(x)

    def _attend(
        self,
        queries: Float[Tensor, "g K j r C D"],
        prompt: Float[Tensor, "2 g K P D"],
        suffix: Float[Tensor, "2 g K j T D"],
        seen: int,
        hidden: Bool[Tensor, "g 1 j 1 C t"] | None,
    ) -> Float[Tensor, "g K j r C D"]:
        """Attend to [the group's prompt | the first ``seen`` tokens of the row], with one softmax
        over both."""
        prompt, suffix = prompt.flatten(1, 2), suffix.flatten(1, 3)
        columns, dim = prompt.shape[2:]
        # bmm in low precision would copy keys that are not contiguous, so there it runs over the
        # empty columns too
        reach = seen if suffix.dtype == self.exact else suffix.shape[2]
        of_group = queries.view(prompt.shape[1], -1, dim).to(prompt.dtype)
        of_row = queries.view(suffix.shape[1], -1, dim).to(suffix.dtype)
        to_prompt = torch.bmm(of_group, prompt[0].mT).view(*of_row.shape[:2], columns)
        to_suffix = torch.bmm(of_row, suffix[0, :, :reach].mT)[:, :, :seen]
        scores = torch.cat([to_prompt, to_suffix], dim=-1).to(self.exact)
        by_query = scores.view(*queries.shape[:-1], -1)
        if self.padding is not None:
            by_query[..., :columns].masked_fill_(self.padding, -torch.inf)
        if hidden is not None:
            masked = by_query[..., columns : columns + hidden.shape[-1]]
            masked.masked_fill_(hidden, -torch.inf)
        to_prompt, to_suffix = scores.softmax(dim=-1).split([columns, seen], dim=-1)
        to_prompt = to_prompt.reshape(*of_group.shape[:2], columns).to(prompt.dtype)
        to_suffix = F.pad(to_suffix, (0, reach - seen)).to(suffix.dtype)
        first = torch.bmm(to_prompt, prompt[1])
        second = torch.bmm(to_suffix, suffix[1, :, :reach])
        return first.view_as(queries).add_(second.view_as(queries))


# --- layers as few, fast operations: fused products of weights in the processor's own layout ------


class FusedDecoder:
    """All layers of a decoder, its last norm and its head; copies of weights in them do not follow
    the weights."""

    def __init__(self, decoder: Decoder, head: nn.Module) -> None:
        self.decoder = decoder
        self.layers = [FusedLayer(layer, decoder) for layer in decoder.layers]
        self.norm, self.head = lean_norm(decoder.norm), fused(head)


class FusedLayer:
    """One layer without its attention, which the caller computes.

    On a CPU with the operation, plain ``nn.Linear`` products are fused: q, k, v in one, gate and up
    in another, over copies of the weights in the processor's layout. 1.3 times as fast at 32 rows,
    1.6 at 2. The copies take as much memory as the weights and do not follow them. An adapter adds
    two small products. Other modules are called as usual.
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

    def rotated(
        self, qkv: Float[Tensor, "N A"], cos: Float[Tensor, "N D"], sin: Float[Tensor, "N D"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, D] and keys [N, K, D], in float32 at least, and the values [N, K,
        D]."""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qk[:, : -self.kv_heads]), self.k_norm(qk[:, -self.kv_heads :])
            qk = torch.cat([q, k], dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, : -self.kv_heads], qk[:, -self.kv_heads :], v

    def finish(
        self, x: Float[Tensor, "N F"], attended: Float[Tensor, "N B"]
    ) -> Float[Tensor, "N F"]:
        """The output of the layer, given the output of its attention."""
        x = self.o(attended).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)


def lean_norm(module: Any) -> Map:
    """The RMS norm of the module as one operation if it gives the same numbers, else the module
    itself."""
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
    # W x + B A x of all parts: all A in one product, and all B, scaled, as a block diagonal in
    # another
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
