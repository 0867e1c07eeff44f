"""Decoding layer by layer: prompts held once for their group, products fused, rows that leave cost
nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.decoder import Decoder, attention_over, embedded, rotate
from gruppo.modalities.text.layouts import Texts, stream

READ_AT_ONCE = 1024
"""Tokens read in one pass, so that activations stay in the processor's cache."""
Map = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class KeptRow:
    """Keys and values of a row between two turns; the decoding that continues the row takes their
    memory."""

    ids: Int[Tensor, "L"]
    """Tokens that have been read, prompt included."""
    fused: FusedDecoder
    """Of the weights under which they were read."""
    prompt: list[Tensor]
    """Of each layer, [2, K, P, D]; one list for all rows of a group."""
    suffix: list[Tensor]
    """Of each layer, what follows the prompt, [2, K, h, D]. Empty once a decoding has taken it."""

    def fits(self, ids: Int[Tensor, "T"], weights: Any) -> bool:
        """Whether a row of these tokens can continue from here: equal weights, and a token left to
        read."""
        count = len(self.ids)
        is_prefix = count < len(ids) and torch.equal(ids[:count], self.ids)
        return is_prefix and self.fused.weights == weights and bool(self.suffix)


class LayeredDecoding:
    """Rows during sampling, run layer by layer.

    Rows are slots of a grid of groups [g, j]: one product for the queries of a group's rows and the
    keys of their prompt, and one for the keys that each row has after it. If groups have unequal
    numbers of rows, or some have left, slots of the grid are empty; only attention is computed
    there, everything else for the rows only.
    """

    logits: Float[Tensor, "N V"]
    columns = 32
    """Tokens by which the buffers of the keys and values of sampled tokens grow."""
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
        starts = self.prefix_len - torch.tensor(ends, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.kept_prompts: list[list[Tensor] | None] = [None] * len(prompts)
        """Of each group, keys and values of its prompt that rows hold between turns, by layer."""
        for owner, row in zip(owners.tolist(), kept, strict=False):
            if row is not None:
                self.kept_prompts[owner] = row.prompt
        self._lay_out(owners, starts)
        self.prompts = self._buffers(int(self.lengths.max()))  # [2, g, K, P, D]
        features = self._read_prompts(prompts)
        # [2, g, K, j, T, D]
        self.suffixes = self._buffers(self.width, self.prefix_len + self.columns)
        if prefixes is None:
            self.logits = fused.head(features)[owners]
        else:
            counts = self._fill(kept)
            unread = [ids[count:] for ids, count in zip(prefixes, counts, strict=True)]
            self.logits = self._read_prefixes(unread)

    # --- rows on the grid ---

    def _lay_out(self, owners: Tensor, starts: Tensor) -> None:
        """Assign one slot to each row, those of a group side by side. ``owners`` and ``starts``
        [N]: the group of each row, and the column of its first token after the prompt."""
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
        # of each slot, the column of its first token, and the position of column 0
        self.first = torch.zeros(self.groups * self.width, dtype=torch.long, device=device)
        self.first[self.slot_of_row] = starts
        self.offset = self.lengths.repeat_interleave(self.width) - self.first
        unused = torch.arange(self.prefix_len, device=device) < self.first[:, None]
        unused = unused.view(self.groups, 1, self.width, 1, 1, -1)
        self.unused = unused if unused.any() else None

    def _place(self, slot_of_row: Tensor) -> None:
        self.slot_of_row = slot_of_row
        slots = torch.arange(self.groups * self.width, device=slot_of_row.device)
        self.is_full = torch.equal(slot_of_row, slots)

    def _buffers(self, *sizes: int) -> list[Tensor]:
        """Allocate keys and values [2, g, K, *sizes, D] of each layer."""
        shape = (2, self.groups, self.decoder.kv_heads, *sizes, self.decoder.head_dim)
        device = self.lengths.device
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.fused.layers]

    def select(self, rows: Int[Tensor, "n"]) -> None:
        """Continue with these rows, each named once; buffers are copied when enough of the grid is
        empty."""
        self.logits = self.logits[rows]
        slots, width = self.slot_of_row[rows], self.width
        if len(rows) > self.min_used_frac * self.groups * width:
            self._place(slots)
            return
        kept, owners = (slots // width).unique(return_inverse=True)
        self.lengths = self.lengths[kept]
        self.kept_prompts = [self.kept_prompts[group] for group in kept.tolist()]
        self._lay_out(owners, self.first[slots])
        source = torch.zeros_like(self.first)  # of each new slot, an empty one from any
        source[self.slot_of_row] = slots
        group, member = source // width, source % width
        longest, shape = int(self.lengths.max()), (self.groups, self.width)
        self._resize(self.prompts, lambda old: old[:, kept, :, :longest])
        self._resize(
            self.suffixes,
            lambda old: old[:, group, :, member].unflatten(0, shape).permute(2, 0, 3, 1, 4, 5),
        )

    def _resize(self, buffers: list[Tensor], resized: Map) -> None:
        """Replace buffers; only one layer is in memory twice at a time."""
        for n, old in enumerate(buffers):
            buffers[n] = resized(old).contiguous()

    # --- rows that are kept for their next turn ---

    def keep(self, row: int, count: int, ids: Int[Tensor, "L"]) -> KeptRow | None:
        """Copy keys and values of a row up to its sampled token number ``count``, if there is room;
        ``ids``: all up to there."""
        slot = int(self.slot_of_row[row])
        group, member = divmod(slot, self.width)
        columns = slice(int(self.first[slot]), self.prefix_len + count)
        suffix = [x[:, group, :, member, columns] for x in self.suffixes]
        prompt = self.kept_prompts[group]
        new = [x[:, group, :, : int(self.lengths[group])] for x in self.prompts if prompt is None]
        needed = sum(x.nbytes for x in (*suffix, *new))
        if needed > self.room:
            return None
        self.room -= needed
        prompt = prompt or [x.clone() for x in new]
        self.kept_prompts[group] = prompt
        return KeptRow(ids, self.fused, prompt, [x.clone() for x in suffix])

    def _fill(self, kept: Sequence[KeptRow | None]) -> list[int]:
        """Move keys and values of kept rows to the suffixes; return how many tokens of each row
        they hold."""
        counts = [0] * len(self.slot_of_row)
        for n, row in enumerate(kept):
            if row is None:
                continue
            counts[n] = row.suffix[0].shape[2]
            slot = int(self.slot_of_row[n])
            group, member = divmod(slot, self.width)
            start = int(self.first[slot])
            for buffer, suffix in zip(self.suffixes, row.suffix, strict=True):
                buffer[:, group, :, member, start : start + counts[n]] = suffix
            row.suffix = []
        return counts

    # --- reading ---

    def _read_prompts(self, prompts: Texts) -> Tensor:
        """Features [n, F] of the last tokens of the prompts that are not kept; keys and values of
        all are stored."""
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

    def _read_run(self, prompts: Texts, run: Sequence[int]) -> Tensor:
        tokens = stream([prompts[n].cpu() for n in run], (), torch.zeros(0))
        x, cos, sin = embedded(self.decoder, tokens.ids, tokens.positions)
        attend = attention_over(tokens, self.decoder, x)
        ends = torch.tensor([len(prompts[n]) for n in run]).cumsum(0)
        for layer, buffer in zip(self.fused.layers, self.prompts, strict=True):
            q, k, v = layer.queries_keys_values(x, cos, sin)
            q, k = q.to(self.dtype), k.to(self.dtype)
            stored = torch.stack([k, v]).transpose(1, 2)  # [2, K, N, D]
            for n, end in zip(run, ends.tolist(), strict=True):
                length = len(prompts[n])
                buffer[:, n, :, :length] = stored[:, :, end - length : end]
            x = layer.finish(x, attend(q, k, v).flatten(1))
        return x[ends.to(x.device) - 1]

    def _read_prefixes(self, unread: Texts) -> Tensor:
        """Read the last tokens of each row, which end at column ``prefix_len``; logits [N, V] after
        the last one.

        Products of weights are computed for these tokens only, attention for a rectangle of columns
        of all slots.
        """
        at_once = max(1, READ_AT_ONCE // len(self.first))  # columns in one pass
        tokens = torch.cat(list(unread))
        columns = [torch.arange(self.prefix_len - len(ids), self.prefix_len) for ids in unread]
        column = torch.cat(columns).to(tokens.device)
        counts = torch.tensor([len(ids) for ids in unread], device=tokens.device)
        slot = self.slot_of_row.repeat_interleave(counts)
        for start in range(int(column.min()), self.prefix_len, at_once):
            stop = min(start + at_once, self.prefix_len)
            is_now = (column >= start) & (column < stop)
            at, slots = column[is_now], slot[is_now]
            seen = torch.arange(stop, device=tokens.device)
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
            self._resize(self.suffixes, lambda old: F.pad(old, (0, 0, 0, self.columns)))

    def _forward(
        self,
        tokens: Tensor,
        slot: Tensor,
        column: Tensor,
        place: Tensor | None,
        hidden: Tensor | None,
        seen: int,
    ) -> Tensor:
        """Features [n, F] of tokens [n] that are written to these slots and columns of the
        suffixes.

        ``place`` [n]: index of each token over [g j, C] slots and the columns of this pass; None if
        the tokens are one for each slot. ``seen``: columns that exist; ``hidden``: those of them
        that a query does not see, [g, 1, j, 1, C, t].
        """
        g, j, kv_heads = self.groups, self.width, self.decoder.kv_heads
        count = 1 if hidden is None else hidden.shape[-2]
        group, member = slot // j, slot % j
        x, cos, sin = embedded(self.decoder, tokens, self.offset[slot] + column)
        buffers = zip(self.fused.layers, self.prompts, self.suffixes, strict=True)
        for layer, prompt, suffix in buffers:
            queries, k, v = layer.queries_keys_values(x, cos, sin)
            for stored, new in zip(suffix, (k, v), strict=True):
                stored[group, :, member, column] = new.to(suffix.dtype)
            if place is not None:
                grid = queries.new_zeros(g * j * count, *queries.shape[1:])
                queries = grid.index_copy_(0, place, queries)
            queries = queries.view(g, j, count, kv_heads, -1, queries.shape[-1])
            queries = queries.permute(0, 3, 1, 4, 2, 5).to(self.dtype).contiguous()
            attended = self._attend(queries, prompt, suffix, seen, hidden)  # [g, K, j, r, C, D]
            attended = attended.permute(0, 2, 4, 1, 3, 5).reshape(g * j * count, -1)
            x = layer.finish(x, attended if place is None else attended.index_select(0, place))
        return self.fused.norm(x)

    def _attend(
        self, queries: Tensor, prompt: Tensor, suffix: Tensor, seen: int, hidden: Tensor | None
    ) -> Tensor:
        """Attend to [the group's prompt | the first ``seen`` tokens of the row], with one softmax
        over both."""
        prompt, suffix = prompt.flatten(1, 2), suffix.flatten(1, 3)  # [2, gK, P, D], [2, gKj, T, D]
        columns, dim = prompt.shape[2:]
        # bmm in low precision would copy keys that are not contiguous, so there it runs over the
        # empty columns too
        reach = seen if self.dtype == self.exact else suffix.shape[2]
        of_group = queries.view(prompt.shape[1], -1, dim)
        of_row = queries.view(suffix.shape[1], -1, dim)
        to_prompt = torch.bmm(of_group, prompt[0].mT).view(*of_row.shape[:2], columns)
        to_suffix = torch.bmm(of_row, suffix[0, :, :reach].mT)[:, :, :seen]
        scores = torch.cat([to_prompt, to_suffix], dim=-1).to(self.exact)
        by_query = scores.view(*queries.shape[:-1], -1)
        if self.padding is not None:
            by_query[..., :columns].masked_fill_(self.padding, -torch.inf)
        if hidden is not None:
            masked = by_query[..., columns : columns + hidden.shape[-1]]
            masked.masked_fill_(hidden, -torch.inf)
        to_prompt, to_suffix = scores.softmax(dim=-1).to(self.dtype).split([columns, seen], dim=-1)
        first = torch.bmm(to_prompt.reshape(*of_group.shape[:2], columns), prompt[1])
        second = torch.bmm(F.pad(to_suffix, (0, reach - seen)), suffix[1, :, :reach])
        return first.view_as(queries).add_(second.view_as(queries))


# --- layers as few, fast operations: fused products of weights in the processor's own layout ------


class FusedDecoder:
    """All layers of a decoder, its last norm and its head; copies of weights in them do not follow
    the weights."""

    weights: Any = None
    """Identifies the weights, where rows are kept."""

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
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.attention_norm = lean_norm(layer.input_layernorm)
        self.mlp_norm = lean_norm(layer.post_attention_layernorm)
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o, self.down = fused(attention.o_proj), fused(mlp.down_proj)
        self.gate_up = fused(mlp.gate_proj, mlp.up_proj)
        self.act = mlp.act_fn

    def queries_keys_values(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries [N, H, D] and keys [N, K, D], rotated, in float32 at least, and the values
        [N, K, D] of inputs [N, F]."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qk[:, : -self.kv_heads]), self.k_norm(qk[:, -self.kv_heads :])
            qk = torch.cat([q, k], dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, : -self.kv_heads] * self.scale, qk[:, -self.kv_heads :], v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output [N, F] of the layer, given its input and the output of its attention."""
        x = self.o(attended).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)


def lean_norm(module: Any) -> Map:
    """The RMS norm of a module as one operation if its parts have the usual names, else the module
    itself."""
    eps = getattr(module, "variance_epsilon", None)
    if eps is None or has_hooks(module):
        return module
    weight = module.weight.detach()
    return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)


def fused(*modules: Any) -> Map:
    """A function that concatenates the outputs of the modules for one input."""
    parts = [low_rank(module) for module in modules]
    linears: list[Any] = [part.base if isinstance(part, LowRank) else part for part in parts]
    if not all(linear is not None and _packs(linear.weight) for linear in linears):
        if len(modules) == 1:
            return modules[0]
        return lambda x: torch.cat([module(x) for module in modules], dim=-1)
    weights = [linear.weight.detach() for linear in linears]
    bias = None
    if any(linear.bias is not None for linear in linears):
        pairs = zip(linears, weights, strict=True)
        bias = torch.cat(
            [w.new_zeros(len(w)) if linear.bias is None else linear.bias for linear, w in pairs]
        ).detach()
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


def _packed(weight: Tensor, bias: Tensor | None = None) -> Map:
    """x W^T + b with W in the processor's layout, by private operations of PyTorch."""
    product = torch.ops.mkldnn._linear_pointwise.default
    # the layout fits any number of rows
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, 32)
    return lambda x: product(x, packed, bias, "none", [], "")


def _packs(weight: Tensor) -> bool:
    """Whether the operations for packed weights exist for such a weight."""
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)
