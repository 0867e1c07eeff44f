"""Decoding layer by layer: prompts held once for their group, products fused, rows that leave cost
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.decoder import Decoder, angles, attend, embedded, rotate
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

    Rows are on a grid of groups [g, j]: one product for the queries of a group's rows and the keys
    of their prompt, and one for the keys that each row has after it. If groups have unequal numbers
    of rows, or some have left, cells of the grid are empty; only attention is computed there,
    everything else for the rows only.
    """

    logits: Float[Tensor, "N V"]
    columns = COLUMNS
    kept_frac = 0.75
    """Share of the grid at which rows are moved together."""

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
        self.fused, self.decoder = fused, fused.decoder
        self.dtype: torch.dtype = next(self.decoder.embed.parameters()).dtype
        self.exact = torch.promote_types(self.dtype, torch.float32)
        device = owners.device
        ends = [0] * len(owners) if prefixes is None else [len(ids) for ids in prefixes]
        self.written = self.begun = max(ends)
        self.starts = self.begun - torch.tensor(ends, device=device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.names = list(range(len(prompts)))
        self.kept_prompts = {
            owner: row.prompt for owner, row in zip(owners.tolist(), kept, strict=False) if row
        }
        """Of each layer, by the name of a group: keys and values of its prompt that rows hold
        between turns."""
        self._lay_out(owners)
        self.prompts = self._empty(len(prompts), int(self.lengths.max()))
        features = self._read_prompts(prompts)
        self.suffixes = self._empty(self.groups * self.width, self.begun + self.columns)
        if prefixes is None:
            self.logits = fused.head(features)[owners]
        else:
            counts = self._fill(kept)
            unread = [ids[count:] for ids, count in zip(prefixes, counts, strict=True)]
            self.logits = self._read_prefixes(unread)

    # --- rows on the grid ---

    def _lay_out(self, owners: Int[Tensor, "N"]) -> None:
        """Assign one cell to each row, those of a group side by side."""
        self.owners = owners
        self.groups = len(self.lengths)
        order = owners.argsort(stable=True)
        sizes = owners.bincount(minlength=self.groups)
        self.width = int(sizes.max())
        rank = torch.empty_like(owners)
        index = torch.arange(len(owners), device=owners.device)
        rank[order] = index - (sizes.cumsum(0) - sizes)[owners[order]]
        self._place(owners * self.width + rank)
        columns = torch.arange(int(self.lengths.max()), device=owners.device)
        padding = columns >= self.lengths[:, None]
        self.padding = padding.view(self.groups, 1, 1, 1, 1, -1) if padding.any() else None
        self.first = torch.zeros(self.groups * self.width, dtype=torch.long, device=owners.device)
        self.first[self.home] = self.starts  # column of each cell's first token after the prompt
        unused = torch.arange(self.begun, device=owners.device) < self.first[:, None]
        unused = unused.view(self.groups, 1, self.width, 1, 1, -1)
        self.unused = unused if unused.any() else None

    def _place(self, home: Int[Tensor, "N"]) -> None:
        self.home = home
        self.rows = torch.zeros(self.groups * self.width, dtype=torch.long, device=home.device)
        self.rows[home] = torch.arange(len(home), device=home.device)
        self.is_full = torch.equal(home, torch.arange(len(self.rows), device=home.device))

    def _empty(self, batch: int, columns: int) -> list[Tensor]:
        """Allocate keys and values [2, batch x kv heads, columns, D] of each layer."""
        shape = (2, batch * self.decoder.kv_heads, columns, self.decoder.head_dim)
        options: dict[str, Any] = {"dtype": self._dtype_for(columns), "device": self.owners.device}
        return [torch.zeros(shape, **options) for _ in self.fused.layers]

    def _dtype_for(self, columns: int) -> torch.dtype:
        is_small = self.groups * self.width * columns <= SMALL
        return self.exact if is_small and self.owners.device.type == "cpu" else self.dtype

    def _by_cell(self, suffix: Tensor) -> Tensor:
        """A view [2, g, K, j, T, D] of the keys and values of a layer's suffixes."""
        return suffix.view(2, self.groups, self.decoder.kv_heads, self.width, *suffix.shape[2:])

    def select(self, slots: Int[Tensor, "n"]) -> None:
        """Continue with these rows, each named once; buffers are copied when enough of the grid is
        empty."""
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
        self._move(self.prompts, (kept * kv_heads + heads).T.flatten(), longest, longest)
        cells = home[self.rows].view(self.groups, 1, self.width)
        # [g, K, j]
        places = (cells // old_width * kv_heads + heads) * old_width + cells % old_width
        self._move(self.suffixes, places.flatten(), self.suffixes[0].shape[2], self.written)

    def _move(self, buffers: list[Tensor], places: Tensor | None, columns: int, used: int) -> None:
        """Move what is at these places, or all, to new buffers; only one layer is in memory twice
        at a time."""
        dtype = self._dtype_for(columns)
        for n, old in enumerate(buffers):
            old = old[:, :, :used] if places is None else old[:, :, :used].index_select(1, places)
            buffers[n] = old
            if old.shape[2] != columns or old.dtype != dtype:
                buffers[n] = old.new_zeros(2, old.shape[1], columns, old.shape[3], dtype=dtype)
                buffers[n][:, :, :used] = old

    # --- rows that are kept for their next turn ---

    def kept_bytes(self, slot: int, tokens: int) -> int:
        """Memory that ``keep`` takes: for this row's tokens, and its group's prompt if no other row
        has kept it."""
        group = int(self.home[slot]) // self.width
        count = self.begun + tokens - int(self.starts[slot])
        count += 0 if self.names[group] in self.kept_prompts else int(self.lengths[group])
        of_token = 2 * self.decoder.kv_heads * self.decoder.head_dim
        return count * of_token * sum(suffix.element_size() for suffix in self.suffixes)

    def keep(self, slot: int, tokens: int, ids: Int[Tensor, "L"], weights: Any) -> KeptRow:
        """Copy keys and values of a row up to its sampled token number ``tokens``; ``ids``: all up
        to there."""
        group, column = divmod(int(self.home[slot]), self.width)
        name, kv_heads = self.names[group], self.decoder.kv_heads
        if name not in self.kept_prompts:
            heads = slice(group * kv_heads, (group + 1) * kv_heads)
            length = int(self.lengths[group])
            self.kept_prompts[name] = [x[:, heads, :length].clone() for x in self.prompts]
        columns = slice(int(self.starts[slot]), self.begun + tokens)
        suffix = [self._by_cell(x)[:, group, :, column, columns].clone() for x in self.suffixes]
        return KeptRow(ids, weights, self.fused, self.kept_prompts[name], suffix)

    def _fill(self, kept: Sequence[KeptRow | None]) -> list[int]:
        """Move keys and values of kept rows to the suffixes; return how many tokens of each row
        they hold."""
        counts = [0] * len(self.owners)
        for n, row in enumerate(kept):
            if row is None:
                continue
            counts[n] = row.suffix[0].shape[2]
            group, column = divmod(int(self.home[n]), self.width)
            start = int(self.starts[n])
            for buffer, suffix in zip(self.suffixes, row.suffix, strict=True):
                self._by_cell(buffer)[:, group, :, column, start : start + counts[n]] = suffix
            row.suffix = []
        return counts

    # --- reading ---

    def _read_prompts(self, prompts: Texts) -> Float[Tensor, "n F"]:
        """Features of the last tokens of the prompts that are not kept; keys and values of all are
        stored."""
        kv_heads = self.decoder.kv_heads
        runs, total = [list[int]()], 0  # prompts that are read in one pass
        for n, prompt in enumerate(prompts):
            heads = slice(n * kv_heads, (n + 1) * kv_heads)
            if n in self.kept_prompts:
                for buffer, keys in zip(self.prompts, self.kept_prompts[n], strict=True):
                    buffer[:, heads, : len(prompt)] = keys
                continue
            if runs[-1] and total + len(prompt) > READ_AT_ONCE:
                runs.append([])
                total = 0
            runs[-1].append(n)
            total += len(prompt)
        last = [self._read_run(prompts, run) for run in runs if run]
        return self.fused.norm(torch.cat(last)) if last else self.prompts[0].new_empty(0)

    def _read_run(self, prompts: Texts, run: Sequence[int]) -> Float[Tensor, "n F"]:
        kv_heads = self.decoder.kv_heads
        none = torch.zeros(0, dtype=torch.long)
        tokens = stream([prompts[n].cpu() for n in run], (), none)
        x, cos, sin = embedded(self.decoder, tokens.ids, tokens.positions)
        blocks = attention_blocks(tokens, x.device, self.exact)
        ends = torch.tensor([len(prompts[n]) for n in run]).cumsum(0)
        for layer, buffer in zip(self.fused.layers, self.prompts, strict=True):
            q, k, v = layer.rotated(layer.qkv(layer.attention_norm(x)), cos, sin)
            q, k = (q * layer.scale).to(self.dtype), k.to(self.dtype)
            for n, end in zip(run, ends.tolist(), strict=True):
                heads, length = slice(n * kv_heads, (n + 1) * kv_heads), len(prompts[n])
                for stored, new in zip(buffer, (k, v), strict=True):
                    stored[heads, :length] = new[end - length : end].transpose(0, 1)
            x = layer.finish(x, attend(q, k, v, blocks).flatten(1))
        return x[ends.to(x.device) - 1]

    def _read_prefixes(self, unread: Texts) -> Float[Tensor, "N V"]:
        """Read the last tokens of each row, which end at column ``begun``; logits after the last
        one.

        Products of weights are computed for these tokens only, attention for a rectangle of columns
        of all cells.
        """
        longest = max(map(len, unread))
        at_once = max(1, READ_AT_ONCE // len(self.rows))  # columns in one pass
        row = torch.cat([torch.full((len(ids),), n) for n, ids in enumerate(unread)])
        column = torch.cat([torch.arange(self.begun - len(ids), self.begun) for ids in unread])
        tokens = torch.cat(list(unread))
        row, column = row.to(tokens.device), column.to(tokens.device)
        g, j, kv_heads = self.groups, self.width, self.decoder.kv_heads
        for start in range(self.begun - longest, self.begun, at_once):
            stop = min(start + at_once, self.begun)
            is_now = (column >= start) & (column < stop)
            rows, at = row[is_now], column[is_now]
            before = (self.lengths[self.owners] - self.starts)[rows]
            x, cos, sin = embedded(self.decoder, tokens[is_now], before + at)
            columns = torch.arange(stop, device=at.device)
            # columns before the row's first token, and those after the query
            hidden = (columns < self.first[:, None, None]) | (columns > columns[start:, None])
            hidden = hidden.view(g, 1, j, 1, stop - start, stop)  # [g, 1, j, 1, C, T]
            cell, query = self.home[rows], at - start
            for layer, prompt, suffix in self._layers():
                q, k, v = layer.rotated(layer.qkv(layer.attention_norm(x)), cos, sin)
                for stored, new in zip(self._by_cell(suffix), (k, v), strict=True):
                    stored[cell // j, :, cell % j, at] = new.to(suffix.dtype)
                queries = q.new_zeros(g * j, stop - start, *q.shape[1:])
                queries[cell, query] = q * layer.scale
                queries = queries.view(g, j, stop - start, kv_heads, -1, q.shape[-1])
                queries = queries.permute(0, 3, 1, 4, 2, 5).contiguous()  # [g, K, j, r, C, D]
                attended = self._attend(queries, prompt, suffix, stop, hidden)
                attended = attended.permute(0, 2, 4, 1, 3, 5).reshape(g * j, stop - start, -1)
                x = layer.finish(x, attended[cell, query].to(self.dtype))
        # the last pass holds the last token of every row
        return self.fused.head(self.fused.norm(x[at == self.begun - 1]))

    # --- sampling ---

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        """Append one token to each row."""
        self._grow()
        positions = self.lengths[self.owners] + self.written - self.starts
        column = torch.tensor([self.written], device=tokens.device)
        rows = None if self.is_full else self.rows
        positions = positions if rows is None else positions[rows]
        self.logits = self._step(tokens, positions, column, self.written + 1, self.unused, rows)
        self.written += 1

    def _grow(self) -> None:
        """Make room for the next column."""
        if self.written == self.suffixes[0].shape[2]:
            self._move(self.suffixes, None, self.written + self.columns, self.written)

    def _step(
        self,
        tokens: Int[Tensor, "N"],
        positions: Int[Tensor, "cells"],
        column: Int[Tensor, "1"],
        seen: int,
        hidden: Bool[Tensor, "g 1 j 1 1 T"] | None,
        rows: Int[Tensor, "cells"] | None = None,
    ) -> Float[Tensor, "N V"]:
        """Logits after these tokens, which are written to ``column``; ``rows``: the row of each
        cell, if they differ."""
        g, j, kv_heads, dim = self.groups, self.width, self.decoder.kv_heads, self.decoder.head_dim
        x = self.decoder.embed(tokens)
        cos, sin = angles(self.decoder, positions, x.dtype)
        for layer, prompt, suffix in self._layers():
            qkv = layer.qkv(layer.attention_norm(x))
            qkv = qkv if rows is None else qkv.index_select(0, rows)
            q, k, v = layer.rotated(qkv, cos, sin)
            for stored, new in zip(self._by_cell(suffix), (k, v), strict=True):
                new = new.to(suffix.dtype).view(g, j, kv_heads, 1, dim).transpose(1, 2)
                stored.index_copy_(3, column, new)
            queries = q.new_empty(g, kv_heads, j, q.shape[1] // kv_heads, 1, dim)
            torch.mul(q.view(g, j, kv_heads, -1, 1, dim).transpose(1, 2), layer.scale, out=queries)
            attended = self._attend(queries, prompt, suffix, seen, hidden)
            attended = attended.transpose(1, 2).reshape(g * j, -1).to(self.dtype)
            x = layer.finish(x, attended if rows is None else attended.index_select(0, self.home))
        return self.fused.head(self.fused.norm(x))

    def _layers(self) -> Iterator[tuple[FusedLayer, Tensor, Tensor]]:
        return zip(self.fused.layers, self.prompts, self.suffixes, strict=True)

    def _attend(
        self,
        queries: Float[Tensor, "g K j r C D"],
        prompt: Float[Tensor, "2 gK P D"],
        suffix: Float[Tensor, "2 gKj T D"],
        seen: int,
        hidden: Bool[Tensor, "g 1 j 1 C t"] | None,
    ) -> Float[Tensor, "g K j r C D"]:
        """Attend to [the group's prompt | the first ``seen`` tokens of the row], with one softmax
        over both."""
        columns, dim = prompt.shape[2:]
        # bmm in low precision would copy keys that are not contiguous, so there it runs over the
        # empty columns too
        reach = seen if suffix.dtype == self.exact else suffix.shape[2]
        of_group = queries.view(len(prompt[0]), -1, dim).to(prompt.dtype)
        of_row = queries.view(len(suffix[0]), -1, dim).to(suffix.dtype)
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
        if reach > seen:
            to_suffix = F.pad(to_suffix, (0, reach - seen))
        first = torch.bmm(
            to_prompt.reshape(*of_group.shape[:2], columns).to(prompt.dtype), prompt[1]
        )
        second = torch.bmm(to_suffix.to(suffix.dtype), suffix[1, :, :reach])
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
