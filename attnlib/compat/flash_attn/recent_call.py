"""The quick path of `flash_attn_with_kvcache`: a call like the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.compat.flash_attn.execution import same_execution
from attnlib.compat.flash_attn.kvcache_call import KVCacheCall
from attnlib.layer.call import LayerCall
from attnlib.layer.plans import find_plan
from attnlib.ops.signature import tensor_check

__all__ = ["RecentCall"]


_VALUES = {type(None), bool, int, float, tuple}
"""Types of arguments that cannot change between two calls, as a tensor can."""


class RecentCall:
    """The call before, for the next call of its kind: one C function compares their tensors.

    Attributes:
        arguments: softmax_scale, causal, window_size, softcap, attention_chunk, return_softmax_lse.
    """

    __slots__ = (
        "_append",
        "_bound",
        "_cache",
        "_call",
        "_check",
        "_fields",
        "_impl",
        "_index",
        "_is_batched",
        "_lens",
        "_like_query",
        "_lse",
        "_new_keys",
        "_plan",
        "_plan_writes",
        "_rows",
        "_shape",
        "_table",
        "_view",
        "_where",
        "arguments",
    )

    @classmethod
    def of(
        cls, call: KVCacheCall, tensors: tuple[Any, ...], arguments: tuple[Any, ...]
    ) -> RecentCall | None:
        """The recent call; None where torch cannot compare tensors quickly."""
        window, k = arguments[2], tensors[3]
        if type(window) is not tuple or any(type(side) is not int for side in window):
            return None
        if not {type(one) for one in arguments} <= _VALUES:
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
        q, k_cache, v_cache, k, v, lens, table = tensors
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
        assert metadata is not None  # `is_simple` calls have a batch for all steps
        query = q.reshape(-1, *q.shape[-2:])
        rows = (*query.shape[:2], v_cache.shape[-1])
        output = torch.empty(rows, dtype=q.dtype, device=q.device)
        plan: Any
        whole = LayerCall(query, None, None, self._cache, metadata, output, call.options.lse)
        plan, _ = find_plan(layer, whole)
        self._impl, self._lse = layer.impl, call.options.lse
        self._append = call.append if self._new_keys else None
        if self._append is not None and hasattr(plan, "appending"):
            plan, self._append = plan.appending(self._append), None
        self._plan = plan
        self._plan_writes = self._new_keys and self._append is None
        self._is_batched = getattr(self._plan, "takes_batches", False) and q.is_contiguous()
        self._rows = tuple(query.shape)
        self._shape = (*q.shape[:2], *rows[1:])
        self._like_query = self._is_batched and self._shape == q.shape
        # Compares the tensors and launches in one C function, where the plan has one.
        self._bound: Callable[..., bool] | None = None
        if self._is_batched:
            like = (q, k_cache, v_cache, ..., ..., k, v, lens, table)
            self._bound = plan.bind_call(*like)
        self._fields = vars(self._cache)
        self._fields.update(key_cache=None, value_cache=None, _signature=signature)

    def _accepts(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        lens: Any,
        table: torch.Tensor | None,
    ) -> bool:
        """Whether the tensors differ in values, and q, k, v and the caches in addresses only."""
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
            return (
                k is not None and v is not None and self._check(q, k_cache, v_cache, k, v, *tensors)
            )
        return k is None and v is None and self._check(q, k_cache, v_cache, *tensors)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        lens: Any,
        table: torch.Tensor | None,
    ) -> Any:
        """Make a call that differs from the one before in values of tensors and in addresses of q,
        k, v and the caches only; None for other calls, of which nothing is done.

        Raises:
            FlashAttentionArgumentError: lengths on a CPU exceed the cache.
        """
        bound = self._bound
        is_like = bound is None or self._index < 0
        if is_like and not self._accepts(q, k_cache, v_cache, k, v, lens, table):
            return None
        if not same_execution(self._where, self._index) or not isinstance(q, torch.Tensor):
            return None
        if self._index < 0:
            self._call.check_capacity()
        if self._like_query:
            result = torch.empty_like(q)
        else:
            result = torch.empty(self._shape, dtype=q.dtype, device=q.device)
        lse = None
        if self._lse:
            lse = torch.empty(
                (self._shape[0] * self._shape[1], self._shape[2]),
                dtype=torch.float32,
                device=q.device,
            )
        # Direct launches read addresses, which are those of the views of the caches too.
        if bound is None or not bound(q, k_cache, v_cache, result, lse, k, v, lens, table):
            if not is_like and not self._accepts(q, k_cache, v_cache, k, v, lens, table):
                return None
            self._run_plan(q, k_cache, v_cache, k, v, result, lse)
            if self._is_batched:
                like = (q, k_cache, v_cache, ..., ..., k, v, lens, table)
                self._bound = self._plan.bind_call(*like)
        return result if lse is None else self._call.shaped(q.shape, result, lse)

    def _run_plan(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The same launches by the plan, on tensors in the shapes that it was made for."""
        if self._view is not None:
            k_cache, v_cache = self._view.of(k_cache, v_cache)
        if self._append is not None:
            self._append.run(k, v, k_cache, v_cache)
        if not self._plan_writes:
            k = v = None
        if not self._is_batched:
            q, output = q.reshape(self._rows), output.view(*self._rows[:2], -1)
        fields = self._fields
        fields["key_cache"], fields["value_cache"] = k_cache, v_cache
        self._plan.run(self._impl, q, k, v, self._cache, output, lse)
        fields["key_cache"] = fields["value_cache"] = None
