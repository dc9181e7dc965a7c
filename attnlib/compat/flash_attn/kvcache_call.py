"""Prepared calls of `flash_attn_with_kvcache`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flash_attn.arguments import FlashAttentionArgumentError, argument_errors
from attnlib.compat.flash_attn.execution import Execution
from attnlib.compat.flash_attn.options import Options
from attnlib.compat.flash_attn.prepared import Batch, PreparedBatch, layer_for
from attnlib.compat.flash_attn.views import BlockView, block_views, token_views
from attnlib.ops.addresses import are_readable, check_block_table

__all__ = ["KVCacheCall"]


class KVCacheCall:
    """What follows from the arguments of a call besides the values of its tensors.

    Args:
        options: the options of the call.
        where: where it runs.
        tensors: q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad and the
            block table of the first such call.
        packed: cu_seqlens_q and max_seqlen_q, or None.

    Attributes:
        append: the `BoundAppend` that wrote the new keys of the last call; None where there was
            none.
    """

    def __init__(
        self,
        options: Options,
        where: Execution,
        tensors: tuple[Any, ...],
        packed: tuple[torch.Tensor | None, int | None],
    ) -> None:
        q, k_cache, v_cache, k, _, lens, index, leftpad, table = tensors
        starts, longest = packed
        self.where, self.options = where, options
        self.append: Any = None
        self._device = q.device
        self._requests = requests = q.shape[0] if starts is None else starts.shape[0] - 1
        self._new = 0 if k is None else k.shape[1]
        self._capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
        self._num_blocks = None if table is None else k_cache.shape[0]
        self.view = _view(k_cache, v_cache, table, leftpad)
        self._rows: torch.Tensor | None = None
        self._table = self._block_table(table, index, leftpad)
        self._is_int = isinstance(lens, int)
        if isinstance(lens, torch.Tensor):
            self._lens = lens
        else:  # None: the cache is full; an int: filled in every call
            self._lens = self._int32(requests).fill_(self._capacity)
        self._cached = self._lens if leftpad is None else self._int32(requests)
        self._seq_lens = self._int32(requests) if self._new else self._cached
        uniform = q.shape[1] if starts is None else None
        if starts is None:
            starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * q.shape[1]
        self._batch = Batch(
            starts, self._seq_lens, self._table,
            num_tokens=q.shape[0] if uniform is None else requests * uniform,
            max_query_len=int(longest or 0) if uniform is None else uniform,
            max_seq_len=self._capacity, query_lens=uniform,
        )  # fmt: skip
        self._spec = options.spec(
            q.dtype, q.shape[-2], k_cache.shape[2], (q.shape[-1], v_cache.shape[-1]),
            self.view.block_size,
        )  # fmt: skip
        self._parts: dict[bool, list[PreparedBatch]] = {}

    @property
    def whole(self) -> PreparedBatch:
        """The batch of a call without slopes per request."""
        return self._parts[False][0]

    @property
    def is_simple(self) -> bool:
        """Whether a call computes no tensor besides the new lengths, and the backend reads lengths
        on the device."""
        derives = self._is_int or self._rows is not None or self._cached is not self._lens
        plain = not derives and self._batch.query_lens is not None and not self.options.alibi
        return plain and self._batch.num_tokens > 0 and self.whole.metadata is not None

    def lengths(self, cache_seqlens: int | torch.Tensor | None) -> torch.Tensor:
        """`[B]` int32, cached tokens before the call, padding on the left included.

        Raises:
            FlashAttentionArgumentError: lengths on a CPU exceed the cache.
        """
        if self._is_int:
            assert isinstance(cache_seqlens, int)
            self._lens.fill_(cache_seqlens)
        if self._device.type == "cpu":
            self.check_capacity()
        return self._lens

    def check_capacity(self) -> None:
        """Compare lengths and blocks on a CPU with the cache.

        Raises:
            FlashAttentionArgumentError: they exceed it.
        """
        if not self._requests:
            return
        least, most = (int(x) for x in self._lens.aminmax())
        longest = most + self._new
        if least < 0 or longest > self._capacity:
            raise FlashAttentionArgumentError(
                f"cache_seqlens from {least} on, with {self._new} new tokens, reaches {longest}, "
                f"but the block_table or the cache holds 0 to {self._capacity} tokens per request",
                rule="P3",
            )
        if self._num_blocks is not None:
            with argument_errors():
                check_block_table(
                    self._table, self._lens + self._new, self.view.block_size, self._num_blocks,
                    what="cache_seqlens",
                )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        index: torch.Tensor | None,
        leftpad: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> Any:
        """One call. Everything is checked before the new keys are written."""
        self._derive(index, leftpad)
        parts = self._prepared_parts(slopes)
        keys, values = self.view.of(k_cache, v_cache)
        cache = PagedKVCache.from_views(keys, values)
        query = q.reshape(-1, *q.shape[-2:])
        shape = (*query.shape[:2], v_cache.shape[-1])
        output, lse = torch.empty(shape, dtype=q.dtype, device=q.device), None
        if self.options.lse:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        rows, runs = self._batch.num_tokens // len(parts) if parts else 0, []
        for number, part in enumerate(parts):
            own = slice(number * rows, (number + 1) * rows)
            runs.append(part.plan(
                query[own], cache, output[own], None if lse is None else lse[own],
                None if slopes is None else slopes[number],
            ))  # fmt: skip
        if k is not None and v is not None:
            self._append(k, v, keys, values)
        for run in runs:
            run()
        return self.shaped(q.shape, output, lse)

    def shaped(self, shape: torch.Size, output: torch.Tensor, lse: torch.Tensor | None) -> Any:
        """Output and LSE of packed rows in the shapes that FlashAttention returns."""
        result = output.view(*shape[:-1], output.shape[-1])
        if lse is None:
            return result
        if self._batch.query_lens is None:
            return result, lse.T.contiguous()
        return result, lse.view(shape[:-1]).transpose(1, 2).contiguous()

    def _int32(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)

    def _prepared_parts(self, slopes: torch.Tensor | None) -> list[PreparedBatch]:
        """The batches of a call: one, or one per request where ALiBi slopes differ."""
        each = slopes is not None and slopes.shape[0] > 1
        found = self._parts.get(each)
        if found is None:
            first = None if slopes is None else slopes[0]
            layer = layer_for(self._spec, self.options.scale, self._device, self.where, first)
            batches = [self._batch]
            if each:
                batches = [self._batch.request(request) for request in range(self._requests)]
            found = [PreparedBatch(layer, batch, self.where) for batch in batches]
            self._parts[each] = found
        on_cpu = self._device.type == "cpu"
        if self._new and (on_cpu or any(part.metadata is None for part in found)):
            # `plan` reads the new lengths on the host, before `_append` computes them.
            torch.add(self._cached, self._new, out=self._seq_lens)
        return found

    def _append(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self.append = None
        tensors = (k, v, keys, values, self._table, self._cached, self._seq_lens)
        if not k.numel() or not keys.shape[0]:
            torch.add(self._cached, self._new, out=self._seq_lens)
        elif k.is_cuda or self._uses_triton:
            self.append = import_module("attnlib.ops.triton.append_kv").bind_append(*tensors)
            self.append.run(k, v, keys, values)
        else:
            import_module("attnlib.ops.torch.append_kv").append_kv(*tensors)

    @property
    def _uses_triton(self) -> bool:
        parts = next(iter(self._parts.values()))
        return bool(parts) and parts[0].layer.backend.get_name() == "triton"

    def _block_table(
        self, table: torch.Tensor | None, index: torch.Tensor | None, leftpad: torch.Tensor | None
    ) -> torch.Tensor:
        """The block table that kernels read. `_derive` computes one that depends on values of
        `index` or `leftpad` in every call."""
        if table is not None:
            return table
        if index is None and leftpad is None:
            return self.view.table(self._requests, self._device)
        self._rows = self.view.table(self._requests if index is None else 1, self._device)
        return self._int32(self._requests, self.view.blocks_per_sequence)

    def _derive(self, index: torch.Tensor | None, leftpad: torch.Tensor | None) -> None:
        """Compute the block table and the lengths from the present values, on the device."""
        rows = self._rows
        if rows is not None:
            if index is not None:
                rows = rows + index.to(torch.int32)[:, None] * self.view.step
            if leftpad is not None:
                rows = rows + leftpad[:, None]
            self._table.copy_(rows)
        if leftpad is not None:
            torch.sub(self._lens, leftpad, out=self._cached)
            if are_readable(leftpad) and bool(((leftpad < 0) | (self._cached < 0)).any()):
                raise FlashAttentionArgumentError(
                    f"cache_leftpad is {leftpad.tolist()} and cache_seqlens {self._lens.tolist()}; "
                    "the padding must be from 0 to the length of its request",
                    rule="P3",
                )


def _view(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor | None,
    leftpad: torch.Tensor | None,
) -> BlockView:
    if table is not None:
        return BlockView(k_cache.shape[1], 1, 1, None, None)
    if leftpad is not None:
        return token_views(k_cache, v_cache)
    return block_views(k_cache, v_cache)
