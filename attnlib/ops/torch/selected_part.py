"""Attention of some queries to the keys that their lists select."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import Request
from attnlib.ops.torch.mask import score_bias, visible_keys
from attnlib.ops.torch.quant import head_factor, may_be_nan
from attnlib.ops.torch.request import fill_empty_rows
from attnlib.ops.torch.row_terms import score_dtype
from attnlib.ops.torch.softmax import softmax_with_sink
from attnlib.sparse.key_selection import KeySelection, SelectionScope

__all__ = ["SelectedPart"]

_MAX_ELEMENTS = 1 << 24
"""Most elements of gathered keys, and of scores, that are held at a time."""


@dataclass(frozen=True)
class SelectedPart:
    """The queries of one request and the cache that they read."""

    request: Request
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    params: AttentionParams
    selection: KeySelection

    def attend(self, lists: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Write the attention of the request.

        Args:
            lists: `[C, H, K]`, one list for each block of queries.
            out: `[query_len, Hq, Dv]`, written.
            lse: `[query_len, Hq]`, written when given.
        """
        positions = self._positions(lists)
        num_keys = positions.shape[2]
        if num_keys == 0 or self.key_cache.shape[0] == 0:
            fill_empty_rows(out, lse, self.params.sinks)
            return
        size = self.selection.query_block_size
        head_size = self.key_cache.shape[3]
        per_list = num_keys * out.shape[1] * max(size, head_size)
        step = max(1, _MAX_ELEMENTS // per_list)
        for begin in range(0, lists.shape[0], step):
            tokens = slice(begin * size, min((begin + step) * size, out.shape[0]))
            result, logs = self._attend_lists(positions[begin : begin + step], tokens)
            out[tokens].copy_(result)
            if lse is not None:
                lse[tokens].copy_(logs)

    def _positions(self, lists: Tensor) -> Tensor:
        """The selected positions `[C, H, S]` int64 in ascending order; -1 at the end of short
        lists. On a CPU, S is the number of keys of the longest list."""
        size, seq_len = self.selection.block_size, self.request.seq_len
        positions = lists.long()[..., None] * size + torch.arange(size, device=lists.device)
        hidden = (positions < 0) | (positions >= seq_len)
        positions = positions.masked_fill(hidden, seq_len).flatten(-2).sort().values
        if lists.device.type == "cpu" and positions.numel():
            positions = positions[..., : int((positions < seq_len).sum(-1).max())]
        return positions.masked_fill(positions == seq_len, -1)

    def _attend_lists(self, positions: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """Output `[n, Hq, Dv]` and LSE `[n, Hq]` of the query tokens `tokens`.

        Args:
            positions: `[C, H, S]` of the lists of these tokens.
            tokens: of the request, a multiple of the block of queries.
        """
        params, size = self.params, self.selection.query_block_size
        query = self.query[self.request.rows][tokens]
        count, num_heads, head_size = query.shape
        num_lists, list_heads, num_keys = positions.shape
        padded = query.new_zeros(num_lists * size, num_heads, head_size)
        padded[:count] = query
        num_kv_heads = self.value_cache.shape[2]
        per_query_head = self.selection.scope is SelectionScope.QUERY_HEAD
        units = num_heads if per_query_head else num_kv_heads  # sets of keys for each list
        group = num_heads // units
        dtype = score_dtype(query)
        exists = positions >= 0
        keys, values = self._gather(positions, units)
        empty = ~exists.expand(num_lists, list_heads, num_keys)[..., None]
        keys, values = (x.to(dtype).masked_fill(empty, 0.0) for x in (keys, values))
        rows = padded.to(dtype).view(num_lists, size, units, group, head_size)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(num_lists * units, group * size, head_size)
        logits = torch.bmm(rows, keys.flatten(0, 1).transpose(1, 2)) * params.scale
        logits = logits * self._of_units(head_factor(params.k_scale), units, num_lists)
        if params.logits_soft_cap > 0:
            logits = torch.tanh(logits / params.logits_soft_cap) * params.logits_soft_cap
        logits = logits.view(num_lists, units * group, size, num_keys)
        per_head = (
            positions
            if list_heads == 1
            else positions.repeat_interleave(num_heads // list_heads, dim=1)
        )
        bias, hidden = self._bias(per_head, tokens, count, dtype)
        if bias is not None:
            logits = logits + bias
        logits = self._score(logits, per_head, tokens).masked_fill(hidden, -torch.inf)
        flat = logits.permute(1, 0, 2, 3).reshape(num_heads, num_lists * size, num_keys)
        weights, lse, without_keys = softmax_with_sink(flat, params.sinks)
        weights = weights.view(num_heads, num_lists, size, num_keys).permute(1, 0, 2, 3)
        weights = weights.reshape(num_lists * units, group * size, num_keys)
        result = torch.bmm(weights, values.flatten(0, 1))
        v_factor = head_factor(params.v_scale)
        result = result * self._of_units(v_factor, units, num_lists)
        result = result.view(num_lists, num_heads, size, -1).permute(0, 2, 1, 3).flatten(0, 1)
        if may_be_nan(v_factor):
            result = result.masked_fill(without_keys.transpose(0, 1).unsqueeze(-1), 0.0)  # M5
        return result[:count], lse.transpose(0, 1)[:count]

    def _gather(self, positions: Tensor, units: int) -> tuple[Tensor, Tensor]:
        """Keys `[C, units, S, D]` and values `[C, units, S, Dv]` as stored. Positions of -1 get the
        elements of some selected position."""
        block_size = self.key_cache.shape[1]
        own = positions.amax(dim=-1, keepdim=True).clamp(min=0)
        read = torch.where(positions >= 0, positions, own)
        num_blocks = self.block_table.shape[1]
        columns = (read // block_size).clamp(max=max(num_blocks - 1, 0))
        blocks = self.block_table[self.request.index].long()[columns]
        blocks = blocks.clamp(0, self.key_cache.shape[0] - 1)
        heads = torch.arange(units, device=positions.device) * self.key_cache.shape[2] // units
        offsets = read % block_size
        found = []
        for cache in (self.key_cache, self.value_cache):
            raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
            found.append(raw[blocks, offsets, heads[:, None]].view(cache.dtype))
        return found[0], found[1]

    def _bias(
        self, keys: Tensor, tokens: slice, count: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        """Biases `[C, 1 or Hq, size, S]` or None, and the hidden keys, a bool of that shape."""
        request, params = self.request, self.params
        size, num_lists = self.selection.query_block_size, keys.shape[0]
        index = torch.arange(num_lists * size, device=keys.device) + tokens.start
        positions = (index + request.first_position).view(num_lists, 1, size)
        visible = visible_keys(positions, keys, request.causal, params) & (keys >= 0)[:, :, None]
        bias = None
        if params.query_bias is not None:
            rows = params.query_bias[request.rows][tokens]
            rows = torch.nn.functional.pad(rows, (0, 0, 0, num_lists * size - count))
            columns = keys - request.first_position
            inside = (columns >= 0) & (columns < request.query_len)
            picked = rows.view(num_lists, 1, size, -1).expand(-1, keys.shape[1], -1, -1)
            spread = columns.clamp(0, max(request.query_len - 1, 0))[:, :, None].expand(
                -1, -1, size, -1
            )
            bias = picked.gather(3, spread).masked_fill(~inside[:, :, None], 0.0).to(dtype)
            visible = visible & (bias != -torch.inf)
            bias = bias.masked_fill(bias == -torch.inf, 0.0)
        if params.alibi_slopes is not None:
            slopes = score_bias(positions, keys, None, params, None, dtype)
            assert slopes is not None
            # [C, 1 or Hq, Hq, size, S]: the list of each head and the slope of the same head.
            heads = torch.arange(slopes.shape[2], device=keys.device)
            slopes = slopes[:, heads if keys.shape[1] > 1 else heads * 0, heads]
            bias = slopes if bias is None else bias + slopes
        return bias, ~visible

    def _score(self, logits: Tensor, keys: Tensor, tokens: slice) -> Tensor:
        """The logits `[C, Hq, size, S]` after the score function."""
        function, (num_lists, num_heads, size, _) = self.params.score_function, logits.shape
        if function is None:
            return logits
        index = torch.arange(num_lists * size, device=keys.device) + tokens.start
        positions = (index + self.request.first_position).view(num_lists, 1, size, 1)
        heads = torch.arange(num_heads, device=keys.device)[:, None, None]
        return function.evaluate(
            logits,
            positions,
            keys[:, :, None].clamp(min=0),
            heads,
            self.request.index,
            self.params.score_tensors,
        )

    def _of_units(self, factor: float | Tensor, units: int, num_lists: int) -> float | Tensor:
        """A scale for each set of keys, from one per tensor or per KV head."""
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            return factor
        heads = torch.arange(units, device=factor.device) * factor.numel() // units
        return factor[heads].repeat(num_lists).view(-1, 1, 1)
