"""The launches of a step for one call signature: the cache write and attention, without addresses.

They outlive a batch: `StepLaunches` are kept in the launch cache. A plan (`plan.py`) binds them to
the tensors of its batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.batch_tensors import Batch
from attnlib.ops.triton.cache_write import CacheWrite
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.run import PreparedAttention, PreparedConcurrentPrefill
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    LSE,
    OUT,
    QUERY,
    SINKS,
    VALUE,
    VALUE_CACHE,
    Launches,
    Part,
    Source,
    prepare_sequence,
)
from attnlib.spec import AttentionSpec

__all__ = ["LayerCall", "StepLaunches", "row_bytes"]


class LayerCall(NamedTuple):
    """The tensors of a layer's call: `[T, Hq, D]` queries and outputs, `[T, Hkv, D]` new keys and
    `[T, Hkv, Dv]` values or None, and `[T, Hq]` float32 LSEs or None."""

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: PagedKVCache
    out: Tensor
    lse: Tensor | None

    def values(self, impl: AttentionImpl) -> tuple[Any, ...]:
        """The values of the call, in the order of `launch.sequence`."""
        cache = self.cache
        return (
            *(self.query, cache.key_cache, cache.value_cache, self.out, self.lse),
            *(self.key, self.value),
            *impl.per_head_tensors,
            *(cache.k_scale, cache.v_scale),
            *impl.layer_score_tensors,
        )

    def per_head(self, spec: AttentionSpec) -> LayerCall:
        """The call with flat tensors as views per head."""
        key, value = self.key, self.value
        return self._replace(
            query=self.query.view(-1, spec.num_heads, spec.head_size),
            key=None if key is None else key.view(-1, spec.num_kv_heads, spec.head_size),
            value=None if value is None else value.view(-1, spec.num_kv_heads, spec.head_size_v),
            out=self.out.view(-1, spec.num_heads, spec.head_size_v),
        )

    @property
    def addresses(self) -> int:
        """The addresses of queries, caches and output, joined by `|`."""
        cache = self.cache
        queries = self.query.data_ptr() | self.out.data_ptr()
        return queries | cache.key_cache.data_ptr() | cache.value_cache.data_ptr()


class StepLaunches:
    """The launches of one call signature over batches of one form.

    Attributes:
        limits: the chip that they were prepared for.
        write: the cache write; None where nothing is written.
        decode, prefill: of the parts of the batch; None for an empty part.
        concurrent: the prefill, if it runs concurrently with the decode; else None.
        workspace_bytes: bytes of workspace that the decode needs.
        of_layer: what else than the tensors of `StepPlan.run` a layer gives, by its index in the
            values of a call: slopes, sinks, scales that are tensors, score tensors.
        row_offsets: bytes of the first row of the prefill part, by source; empty for one part.
        hooks: the kernels' own launch hooks.
        template: the direct launches (`prepare_sequence`); None before every kernel has been
            launched by Triton.
        rotated: what the kernels of all parts rotate, queries, and outputs back (P15); None where
            they differ.
    """

    def __init__(
        self,
        call: LayerCall,
        limits: DeviceLimits,
        write: CacheWrite | None,
        decode: PreparedAttention | None,
        prefill: PreparedAttention | None,
        concurrent: PreparedConcurrentPrefill | None,
        row_offsets: dict[Source, int],
        fixed: dict[Source, Any],
        num_values: int,
    ) -> None:
        self.limits = limits
        self.write = write
        self.decode = decode
        self.prefill = prefill
        self.workspace_bytes = 0 if decode is None else decode.workspace_bytes
        parts = [part for part in (decode, prefill) if part is not None]
        sides = {getattr(part, "rotated", None) for part in parts}
        self.rotated: KVRotation | None = sides.pop() if len(sides) == 1 else None
        writes = () if write is None or write.launch is None else (write.launch,)
        of_parts = [kernel for part in parts for kernel in part.kernels]
        self._kernels: tuple[BoundLaunch, ...] = (*writes, *of_parts)
        self.hooks = [kernel.hooks for kernel in self._kernels]
        self.needs_alignment = any(part.needs_alignment for part in parts)
        self.concurrent = concurrent
        self._index = call.query.get_device()
        self.row_offsets = row_offsets
        self.rows_aligned = not any(self.row_offsets.get(x, 0) & ALIGNMENT for x in (QUERY, OUT))
        self._fixed = fixed
        self._num_values = num_values
        given = [number for number in range(num_values) if number not in fixed]
        self.of_layer = tuple(given[VALUE + 1 :])
        self.template: Any = None

    def make_template(self, written: Launches | None = None) -> Any:
        """A template of the direct launches; None where they are not possible yet.

        Args:
            written: launches in place of the cache write.
        """
        if not self.rows_aligned or not all(kernel.is_direct for kernel in self._kernels):
            return None
        parts, first = [], 0
        if written is not None:
            parts = [Part(written)]
        elif self.write is not None:
            parts, first = [Part(self.write.launches(True))], 1
        counts = {False: first, True: first}
        if self.decode is not None:
            counts[True] += self.decode.num_batch_values
        for launches, of_prefill in self.attention(True, True):
            parts.append(Part(launches, self.row_offsets if of_prefill else {}, counts[of_prefill]))
        total = counts[True] + (0 if self.prefill is None else self.prefill.num_batch_values)
        return prepare_sequence(parts, self._index, self._num_values, self._fixed, total)

    def reads(self, call: LayerCall) -> bool:
        """Whether the kernels read tensors at these addresses."""
        return not self.needs_alignment or self._is_aligned(call)

    def _is_aligned(self, call: LayerCall) -> bool:
        """Whether queries, caches and output begin on 16-byte boundaries, in both parts."""
        return self.rows_aligned and not call.addresses & ALIGNMENT

    def run_by_triton(self, call: LayerCall, impl: AttentionImpl, batch: Batch, split: int) -> None:
        """Launch everything by Triton, on tensors.

        Args:
            call: per head.
            impl: of the calling layer.
            batch: its batch.
            split: query tokens of the decode part, if there are two parts; else 0.
        """
        # Scratch memory that is not aligned needs other kernels as well.
        parts = ((self.decode, batch.decodes), (self.prefill, batch.prefills))
        aligned = self._is_aligned(call) and all(
            part is None or tensors is None or part.addresses(tensors) is not None
            for part, tensors in parts
        )
        values, write = list(call.values(impl)), self.write
        with chips.device_guard(call.query):
            if write is not None and call.key is not None and call.value is not None:
                new = call.key.data_ptr() | call.value.data_ptr()
                write_aligned = not (call.addresses | new) & ALIGNMENT
                given = _with_bytes(values) if write.as_bytes else values
                write.launches(False, write_aligned).submit(0, given, (batch.slots,))
            whole = list(values)
            for launches, of_prefill in self.attention(False, aligned):
                part, tensors = (
                    (self.prefill, batch.prefills) if of_prefill else (self.decode, batch.decodes)
                )
                assert part is not None and tensors is not None
                if split:
                    rows = slice(split, None) if of_prefill else slice(None, split)
                    for source in self.row_offsets:
                        x = whole[source]
                        values[source] = None if x is None else x[rows]
                given = _with_bytes(values) if part.as_bytes else values
                launches.submit(0, given, part.tensors(tensors))

    def attention(self, direct: bool, aligned: bool) -> list[tuple[Launches, bool]]:
        """The attention launches of both parts in order, each with whether it is of the prefill
        part.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
        """
        decode, prefill = self.decode, self.prefill
        if decode is None or prefill is None:
            return [
                (part.launches(direct, aligned), part is prefill)
                for part in (decode, prefill)
                if part is not None
            ]
        launches = decode.launches(direct, aligned)
        if self.concurrent is None:
            return [(launches, False), (prefill.launches(direct, aligned), True)]
        # The prefill runs on the SMs that the decode leaves, before its splits are combined.
        attend, *combine = launches.steps
        concurrent = self.concurrent.launches(direct, aligned, concurrent=True)
        combined = [(Launches(tuple(combine)), False)] if combine else []
        return [(launches._replace(steps=(attend,)), False), (concurrent, True), *combined]


def _with_bytes(values: list[Any]) -> list[Any]:
    """The values of a call with caches of float8 as bytes."""
    changed = list(values)
    for source in (KEY_CACHE, VALUE_CACHE):
        changed[source] = values[source].view(torch.uint8)
    return changed


def row_bytes(call: LayerCall, sinks: Tensor | None, row: int) -> dict[Source, int]:
    """Offsets in bytes of a row in query, output, LSE and the sinks of query tokens.

    Args:
        call: of the whole batch.
        sinks: of the layer, or of query tokens; None without any.
        row: query token.
    """
    tensors: dict[Source, Tensor | None] = {QUERY: call.query, OUT: call.out, LSE: call.lse}
    if sinks is not None and sinks.dim() == 2:
        tensors[SINKS] = sinks
    return {
        source: 0 if x is None else row * x.stride(0) * x.element_size()
        for source, x in tensors.items()
    }
