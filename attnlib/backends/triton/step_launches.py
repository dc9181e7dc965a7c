"""The launches of a step for one call signature: the cache write and attention, without addresses.

They outlive a batch: `StepLaunches` are kept in the launch cache. A plan (`plan.py`) binds them to
the tensors of its batch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.cache_write import CacheWrite, prepare_write
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention, PreparedConcurrentPrefill
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    LSE,
    NUM_VALUES,
    OUT,
    QUERY,
    SINKS,
    SLOPES,
    V_SCALE,
    VALUE,
    Launches,
    Part,
    Source,
    prepare_sequence,
)
from attnlib.ops.triton.paged_decode import prepare_decode
from attnlib.ops.triton.paged_mixed import can_run_concurrently
from attnlib.ops.triton.paged_prefill import prepare_prefill

__all__ = ["Batch", "Call", "StepLaunches", "prepare_step"]


class Call(NamedTuple):
    """The tensors of the first call of a kind, per head."""

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor
    lse: Tensor | None


class Batch(NamedTuple):
    """The tensors of a batch: those of the decode part and of the prefill part, None for an empty
    part, and the slots of the new keys."""

    decodes: BatchTensors | None
    prefills: BatchTensors | None
    slots: Tensor | None


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
    """

    def __init__(
        self,
        call: Call,
        limits: DeviceLimits,
        write: CacheWrite | None,
        decode: PreparedAttention | None,
        prefill: PreparedAttention | None,
        concurrent: PreparedConcurrentPrefill | None,
        first_prefill_row: int,
        fixed: dict[Source, Any],
        num_values: int,
    ) -> None:
        self.limits = limits
        self.write = write
        self.decode = decode
        self.prefill = prefill
        self.workspace_bytes = 0 if decode is None else decode.workspace_bytes
        parts = [part for part in (decode, prefill) if part is not None]
        writes = () if write is None or write.launch is None else (write.launch,)
        self._kernels: tuple[BoundLaunch, ...] = (
            *writes, *(kernel for part in parts for kernel in part.kernels),
        )  # fmt: skip
        self.hooks = [kernel.hooks for kernel in self._kernels]
        self.needs_alignment = any(part.needs_alignment for part in parts)
        self.as_bytes = any(part.as_bytes for part in parts)
        self.concurrent = concurrent
        self._index = call.query.get_device()
        self.row_offsets = _row_bytes(call, first_prefill_row) if first_prefill_row else {}
        self.rows_aligned = not any(self.row_offsets.get(x, 0) & ALIGNMENT for x in (QUERY, OUT))
        self._fixed = fixed
        self._num_values = num_values
        given = tuple(number for number in range(num_values) if number not in fixed)
        self.of_layer = given[VALUE + 1 :]
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


def prepare_step(
    impl: AttentionImpl,
    signature: tuple[Any, ...],
    key: Hashable,
    call: Call,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    batch: Batch,
    schedule: DecodeSchedule | None,
    concurrent: DecodeSchedule | None,
    kernels: str,
) -> StepLaunches:
    """Prepare the launches of calls like this one, over batches like this one.

    Args:
        signature: of the call, for the launches of single parts.
        key: where to keep the result in the launch cache.
        schedule: of the decode part.
        concurrent: of the decode part while the prefill part runs, too; None where the parts
            run one after the other.

    Raises:
        ContractError: tensors that the kernels cannot address.
    """
    decodes, prefills, slots = batch
    limits = metadata.scheduler.limits
    params = impl.attention_params(metadata, cache)
    slopes, sinks = impl.per_head_tensors
    params = replace(params, alibi_slopes=slopes, sinks=sinks)
    write = None
    if call.key is not None and call.value is not None and slots is not None:
        write = prepare_write(
            signature, call.key, call.value, call.key_cache, call.value_cache, slots,
            cache.k_scale, cache.v_scale,
        )  # fmt: skip
    split = metadata.num_decode_tokens if metadata.num_prefills else None
    decode = prefill = overlapping = None
    # A part has fewer rows than the call, whose signature alone would also match an unsplit batch
    # of as many tokens.
    part = signature if decodes is None or prefills is None else (signature, split)
    if impl.spec.batch_invariant:
        decode, prefill, overlapping = _prepare_invariant(
            part, call, params, batch, metadata, schedule, concurrent, kernels
        )
        decodes = prefills = None
    if prefills is not None:
        rows = slice(split if decodes is not None else None, None)
        own = _part_call(call, rows, prefills, params, limits, (part, "prefill"))
        prefill = prepare_prefill(own, kernels)
    if decodes is not None and schedule is not None:
        rows = slice(None, split)
        if concurrent is not None and prefill is not None:
            alone = decodes._replace(counters=None)
            own = _part_call(call, rows, alone, params, limits, (part, "concurrent"))
            decode = prepare_decode(own, concurrent)
            overlapping = prefill if can_run_concurrently(prefill, decode) else None
        if overlapping is None:
            own = _part_call(call, rows, decodes, params, limits, (part, "decode"))
            decode = prepare_decode(own, schedule)
    launches = StepLaunches(
        call, limits, write, decode, prefill, overlapping, split or 0, _fixed_values(impl, cache),
        NUM_VALUES + len(impl.layer_score_tensors),
    )  # fmt: skip
    kept: StepLaunches = LAUNCHES.keep(key, launches)
    return kept


def _prepare_invariant(
    signature: tuple[Any, ...],
    call: Call,
    params: AttentionParams,
    batch: Batch,
    metadata: TritonMetadata,
    schedule: DecodeSchedule | None,
    concurrent: DecodeSchedule | None,
    kernels: str,
) -> tuple[PreparedAttention | None, PreparedAttention | None, PreparedConcurrentPrefill | None]:
    """The batch-invariant launches of the decode part and of the prefill part (M15), and the
    prefill again if it runs concurrently with the decode."""
    # Other layers do not import these kernels.
    from attnlib.ops.triton.invariant_attention import prepare_invariant

    decodes, prefills, _ = batch
    limits = metadata.scheduler.limits
    first_prefill_row = None if decodes is None else metadata.num_decode_tokens
    decode = prefill = overlapping = None
    if prefills is not None:
        rows = slice(first_prefill_row, None)
        own = _part_call(call, rows, prefills, params, limits, (signature, "prefill"))
        prefill = prepare_invariant(own, kernels=kernels)
    if decodes is not None and schedule is not None:
        rows = slice(None, None if prefills is None else first_prefill_row)
        own = _part_call(call, rows, decodes, params, limits, (signature, "decode"))
        # The number of CTAs has no effect on the results.
        max_ctas = None if concurrent is None else concurrent.max_ctas
        decode = prepare_invariant(own, schedule.num_splits, kernels, max_ctas)
        if concurrent is not None and prefill is not None:
            overlapping = prefill if can_run_concurrently(prefill, decode) else None
    return decode, prefill, overlapping


def _fixed_values(impl: AttentionImpl, cache: PagedKVCache) -> dict[Source, Any]:
    """Slopes, sinks and scales that are no tensors: part of the signature of a call. Tensors are
    read at each call."""
    spec = impl.spec
    scales = {K_SCALE: cache.k_scale, V_SCALE: cache.v_scale}
    fixed = {source: scale for source, scale in scales.items() if not isinstance(scale, Tensor)}
    return fixed if spec.has_alibi or spec.has_sink else {**fixed, SLOPES: None, SINKS: None}


def _part_call(
    call: Call,
    rows: slice,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    signature: Hashable,
) -> AttentionCall:
    """The call of a part of the batch.

    Args:
        call: of the whole batch.
        rows: query tokens of the part.
        batch: the tensors of the part.
        params: of the whole batch.
        limits: the chip.
        signature: of the part.
    """
    if batch.causal_flags is not None or batch.query_bias is not None:
        causal = params.causal if batch.causal_flags is None else batch.causal_flags
        params = replace(params, causal=causal, query_bias=batch.query_bias)
    return AttentionCall(
        call.query[rows],
        call.key_cache,
        call.value_cache,
        call.out[rows],
        None if call.lse is None else call.lse[rows],
        batch,
        params,
        limits,
        signature,
    )


def _row_bytes(call: Call, row: int) -> dict[Source, int]:
    """Offsets in bytes of a row in query, output and LSE."""
    tensors = {QUERY: call.query, OUT: call.out, LSE: call.lse}
    return {
        source: 0 if x is None else row * x.stride(0) * x.element_size()
        for source, x in tensors.items()
    }
