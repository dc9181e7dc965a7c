"""Prepared calls of `flash_attn_with_kvcache`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flash_attn.options import FlashAttentionArgumentError, Options, check_tensor
from attnlib.compat.flash_attn.prepared import (
    Batch,
    Execution,
    PreparedBatch,
    layer_for,
    same_execution,
)
from attnlib.compat.flash_attn.views import BlockView, block_views, token_views
from attnlib.ops.signature import tensor_check

__all__ = ["KVCacheCall", "RecentCall", "check_kvcache_call"]


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
        """Compare lengths on a CPU with the cache.

        Raises:
            FlashAttentionArgumentError: they exceed it.
        """
        longest = int(self._lens.max()) + self._new if self._requests else 0
        if longest > self._capacity:
            raise FlashAttentionArgumentError(
                f"cache_seqlens with {self._new} new tokens reaches {longest}, but the block_table "
                f"or the cache holds {self._capacity} tokens per request",
                rule="P3",
            )

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
        return result, lse.view(shape[0], shape[1], -1).transpose(1, 2).contiguous()

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


class RecentCall:
    """The call before, for the next call of its kind: one C function compares their tensors.

    Attributes:
        arguments: softmax_scale, causal, window_size, softcap, attention_chunk, return_softmax_lse.
    """

    __slots__ = (
        "_append", "_cache", "_call", "_check", "_fields", "_impl", "_index", "_lens",
        "_like_query", "_lse", "_new_keys", "_plan", "_plan_writes", "_rows", "_shape",
        "_table", "_view",
        "_where", "arguments",
    )  # fmt: skip

    @classmethod
    def of(
        cls, call: KVCacheCall, tensors: tuple[Any, ...], arguments: tuple[Any, ...]
    ) -> RecentCall | None:
        """The recent call; None where torch cannot compare tensors quickly."""
        window, k = arguments[2], tensors[3]
        if type(window) is not tuple or any(type(side) is not int for side in window):
            return None
        check = tensor_check(*(tensor for tensor in tensors if tensor is not None))
        if check is None or (k is not None and call.append is None):
            return None
        return cls(call, check, tensors, arguments)

    def __init__(
        self,
        call: KVCacheCall,
        check: Callable[..., bool],
        tensors: tuple[Any, ...],
        arguments: tuple[Any, ...],
    ) -> None:
        q, k_cache, v_cache, k, _, lens, table = tensors
        self.arguments = arguments
        self._call, self._check, self._where = call, check, call.where
        self._index = q.get_device()
        self._lens = None if lens is None else lens.data_ptr()
        self._table = None if table is None else table.data_ptr()
        self._new_keys = k is not None
        self._view = None if call.view.keys is None else call.view
        # One cache object for all calls, whose views are set in each call and not kept alive.
        self._cache = PagedKVCache.from_views(*call.view.of(k_cache, v_cache))
        signature = self._cache.signature
        layer, metadata = call.whole.layer, call.whole.metadata
        query = q.reshape(-1, *q.shape[-2:])
        rows = (*query.shape[:2], v_cache.shape[-1])
        output = torch.empty(rows, dtype=q.dtype, device=q.device)
        self._plan, _ = layer._find_plan(
            query, None, None, self._cache, metadata, output, call.options.lse
        )
        self._impl, self._lse = layer.impl, call.options.lse
        self._append = call.append if self._new_keys else None
        if self._append is not None and hasattr(self._plan, "appending"):
            self._plan, self._append = self._plan.appending(self._append), None
        self._plan_writes = self._new_keys and self._append is None
        batched = getattr(self._plan, "takes_batches", False) and q.is_contiguous()
        self._rows = None if batched else tuple(query.shape)
        self._shape = (*q.shape[:2], *rows[1:])
        self._like_query = batched and self._shape == q.shape
        self._fields = vars(self._cache)
        self._fields.update(key_cache=None, value_cache=None, _signature=signature)

    def accepts(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        lens: Any,
        table: torch.Tensor | None,
    ) -> bool:
        """Whether a call differs in values of tensors and in addresses of q, k, v and the caches
        only."""
        tensors: tuple[Any, ...]
        if self._table is None:
            if table is not None:
                return False
            tensors = ()
        elif table is None or table.data_ptr() != self._table:
            return False
        else:
            tensors = (table,)
        if self._lens is None:
            if lens is not None:
                return False
        elif not isinstance(lens, torch.Tensor) or lens.data_ptr() != self._lens:
            return False
        else:
            tensors = (lens, *tensors)
        if self._new_keys:
            if k is None or v is None or not self._check(q, k_cache, v_cache, k, v, *tensors):
                return False
        elif k is not None or v is not None or not self._check(q, k_cache, v_cache, *tensors):
            return False
        return same_execution(self._where, self._index)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> Any:
        """One call that `accepts` accepted.

        Raises:
            FlashAttentionArgumentError: lengths on a CPU exceed the cache.
        """
        if self._index < 0:
            self._call.check_capacity()
        if self._view is not None:
            k_cache, v_cache = self._view.of(k_cache, v_cache)
        if self._append is not None:
            self._append.run(k, v, k_cache, v_cache)
        if not self._plan_writes:
            k = v = None
        if self._like_query:
            result = torch.empty_like(q)
        else:
            result = torch.empty(self._shape, dtype=q.dtype, device=q.device)
        query, output, lse = q, result, None
        if self._rows is not None:
            query, output = q.reshape(self._rows), result.view(*self._rows[:2], -1)
        if self._lse:
            lse = torch.empty(
                (self._shape[0] * self._shape[1], self._shape[2]), dtype=torch.float32,
                device=q.device,
            )  # fmt: skip
        fields = self._fields
        fields["key_cache"], fields["value_cache"] = k_cache, v_cache
        self._plan.run(self._impl, query, k, v, self._cache, output, lse)
        fields["key_cache"] = fields["value_cache"] = None
        return result if lse is None else self._call.shaped(q.shape, result, lse)


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


def check_kvcache_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    lens: int | torch.Tensor | None,
    index: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    starts: torch.Tensor | None,
    longest: int | None,
    rotary_cos: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and devices of a call; arguments as in `flash_attn_with_kvcache`.

    Raises:
        FlashAttentionArgumentError: an argument does not fit; the message names it.
    """
    heads = "headdim]"
    if starts is None:
        check_tensor("q", q, 4, f"[batch, seqlen, heads, {heads}", q)
        requests = q.shape[0]
    else:
        check_tensor("q", q, 3, f"[tokens, heads, {heads} with cu_seqlens_q", q)
        check_tensor("cu_seqlens_q", starts, 1, "[batch + 1]", q, torch.int32)
        requests = starts.shape[0] - 1
        if not longest or requests < 0 or not starts.is_contiguous():
            raise FlashAttentionArgumentError(
                f"cu_seqlens_q {tuple(starts.shape)} with max_seqlen_q={longest}: it must be "
                "contiguous [batch + 1], and max_seqlen_q at least 1"
            )
        if k is not None:
            raise FlashAttentionArgumentError(
                "k with cu_seqlens_q: new keys need queries [batch, seqlen, heads, headdim]"
            )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, 4, f"[batch or blocks, tokens, KV heads, {heads}", q)
        if cache.stride(3) != 1 and cache.shape[3] > 1:
            raise FlashAttentionArgumentError(
                f"{name} has last stride {cache.stride(3)}; it must be 1, because the cache is "
                "not copied"
            )
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[-1]:
        raise FlashAttentionArgumentError(
            f"k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)} and q "
            f"{tuple(q.shape)} must agree in blocks, tokens, KV heads and headdim"
        )
    if not k_cache.shape[1]:
        raise FlashAttentionArgumentError("k_cache has no token per sequence or block")
    _check_rows(q, k_cache, index, leftpad, table, requests)
    if isinstance(lens, torch.Tensor):
        _check_per_request("cache_seqlens", lens, q, requests, (torch.int32,))
    elif lens is not None and (not isinstance(lens, int) or lens < 0):
        raise FlashAttentionArgumentError(
            f"cache_seqlens={lens!r} must be an int of at least 0, or [{requests}] int32"
        )
    if (k is None) != (v is None):
        raise FlashAttentionArgumentError("k and v: pass both or neither")
    if k is not None and v is not None:
        _check_new_keys(q, k_cache, v_cache, k, v, lens)
    elif rotary_cos is not None:
        raise FlashAttentionArgumentError(
            "rotary_cos without k and v: the keys to rotate are new ones"
        )


def _check_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    index: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    requests: int,
) -> None:
    if table is not None:
        check_tensor("block_table", table, 2, "[batch, max_blocks]", q, torch.int32)
        if table.shape[0] != requests or not table.shape[1]:
            raise FlashAttentionArgumentError(
                f"block_table has shape {tuple(table.shape)}; it must be [{requests}, at least 1]"
            )
        if index is not None or leftpad is not None:
            name = "cache_leftpad" if index is None else "cache_batch_idx"
            raise FlashAttentionArgumentError(f"{name} with a block_table: the table says it all")
        return
    if index is not None:
        _check_per_request("cache_batch_idx", index, q, requests, (torch.int32, torch.int64))
    elif k_cache.shape[0] < requests:
        raise FlashAttentionArgumentError(
            f"k_cache holds {k_cache.shape[0]} sequences for {requests} requests"
        )
    if leftpad is not None:
        _check_per_request("cache_leftpad", leftpad, q, requests, (torch.int32,))


def _check_per_request(
    name: str,
    tensor: torch.Tensor,
    q: torch.Tensor,
    requests: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    dtype = tensor.dtype if tensor.dtype in dtypes else dtypes[0]
    check_tensor(name, tensor, 1, f"[{requests}]", q, dtype)
    if tensor.shape != (requests,) or not tensor.is_contiguous():
        raise FlashAttentionArgumentError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
            f"contiguous [{requests}]"
        )


def _check_new_keys(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: int | torch.Tensor | None,
) -> None:
    if lens is None:
        raise FlashAttentionArgumentError("k and v without cache_seqlens: where to write them?")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, new, 4, "[batch, new tokens, KV heads, headdim]", q)
        if (new.shape[0], *new.shape[2:]) != (q.shape[0], *cache.shape[2:]):
            raise FlashAttentionArgumentError(
                f"{name} has shape {tuple(new.shape)}; it must be "
                f"[{q.shape[0]}, new tokens, {cache.shape[2]}, {cache.shape[3]}]"
            )
    if k.shape[1] != v.shape[1]:
        raise FlashAttentionArgumentError(f"k has {k.shape[1]} new tokens, v {v.shape[1]}")
