"""Step plans: reuse one layer's launches for the next; only tensor addresses change.

A plan is made for the first call of a kind over a batch. It prepares the launches of the cache
write and of the attention (`ops.triton`), attaches the tensors of the batch, and then runs for
every layer: it reads the addresses of the layer's tensors and submits the kernels. Where an address
is not aligned, a launch hook of Triton is active, another device is current, or a kernel was never
launched before, the same kernels are launched by Triton, on tensors. Hooks of a single kernel
(`pre_run_hooks`) are read when a plan is made.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.append_kv import BoundAppend
from attnlib.ops.triton.cache_write import CacheWrite, prepare_write
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.launch.attention import BatchTensors
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY_CACHE,
    LSE,
    NUM_VALUES,
    OUT,
    QUERY,
    SINKS,
    SLOPES,
    V_SCALE,
    VALUE,
    VALUE_CACHE,
    BoundLaunches,
    Source,
    bind_check,
    bind_sequence,
)
from attnlib.ops.triton.launch.signature import batch_signature
from attnlib.ops.triton.paged_decode import prepare_decode
from attnlib.ops.triton.paged_mixed import can_run_concurrently
from attnlib.ops.triton.paged_prefill import prepare_prefill
from attnlib.spec import AttentionSpec

__all__ = ["TritonPlan"]


class _Launches(NamedTuple):
    """The launches of one call signature, without addresses: cached across batches.

    Attributes:
        limits: the chip that they were prepared for.
        write: the cache write; None where nothing is written.
        decode, prefill: of the parts of the batch; None for an empty part.
        concurrent: whether the prefill runs beside the decode.
    """

    limits: DeviceLimits
    write: CacheWrite | None
    decode: PreparedAttention | None
    prefill: PreparedAttention | None
    concurrent: bool

    @property
    def parts(self) -> list[PreparedAttention]:
        """The parts that are not empty."""
        return [part for part in (self.decode, self.prefill) if part is not None]


class _Call(NamedTuple):
    """The tensors of the first call of a kind, per head."""

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor
    lse: Tensor | None


class TritonPlan:
    """The launches of one kind of call over one batch.

    Args:
        impl: of the first layer that makes such a call.
        signature: of the call.
        query, key, value, cache, output, lse: of the call, per head.
        metadata: the batch.
        kernels: "auto", "hopper" or "portable".

    Raises:
        ContractError: tensors that the kernels cannot address.
    """

    takes_batches: ClassVar[bool] = True
    """`run` also takes a contiguous query and output with a batch dimension, `[B, T / B, H, D]`."""

    direct: Callable[..., bool] | None
    """`direct(query, key_cache, value_cache, output, lse, key, value)` does what `run` does, and
    reads nothing but the addresses of the tensors. It returns False and does nothing where `run`
    is needed. None where a layer has other tensors, or before the first launch by Triton."""

    def __init__(
        self,
        impl: AttentionImpl,
        signature: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: Tensor,
        lse: Tensor | None,
        kernels: str,
    ) -> None:
        call = _Call(query, key, value, cache.key_cache, cache.value_cache, output, lse)
        self._spec = impl.spec
        self._signature = signature
        self._metadata = weakref.ref(metadata)  # the batch owns its plans
        self._split = metadata.num_decode_tokens if metadata.num_prefills else 0
        parts = _part_batches(metadata)
        self._launches = _prepare(impl, signature, call, cache, metadata, parts, kernels)
        self._decode_batch, self._prefill_batch = parts
        if parts[0] is not None and self._launches.decode is not None:
            self._decode_batch = _with_workspace(self._launches, parts[0], query.device)
        self._slots = metadata.slot_mapping
        self._index = query.get_device()
        self._fixed = _fixed_values(impl, cache)
        self._num_values = NUM_VALUES + len(impl.layer_score_tensors)
        given = tuple(n for n in range(self._num_values) if n not in self._fixed)
        # What else than the tensors of `run` a layer gives: slopes, sinks, scales, score tensors.
        self._of_layer = given[VALUE + 1 :]
        self._rows = _row_bytes(call, self._split) if self._split else (0, 0, 0)
        self._append: BoundAppend | None = None
        self._submit: Callable[..., bool] | None = None
        self.direct = None
        self._fallback: TritonPlan | None = None
        self._storages: list[torch.UntypedStorage] = []
        self._bind()

    def run(
        self,
        impl: AttentionImpl,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: PagedKVCache,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        direct = self.direct
        if direct is not None:
            if direct(query, cache.key_cache, cache.value_cache, output, lse, key, value):
                return
        elif self._submit is not None:
            values = self._values(impl, query, key, value, cache, output, lse)
            if self._submit(*values[: VALUE + 1], *(values[n] for n in self._of_layer)):
                return
        if self._append is not None and key is not None and value is not None:
            self._append.run(key, value, cache.key_cache, cache.value_cache)
            key = value = None
        self._run_by_triton(impl, query, key, value, cache, output, lse)

    def bind_call(self, *like: Any) -> Callable[..., bool] | None:
        """See `StepPlan`. `like` has the tensors of a call, None for values that must be None and
        `...` for any; further tensors must be at the same addresses in each call."""
        return None if self.direct is None else bind_check(self.direct, like)

    def appending(self, append: BoundAppend) -> TritonPlan:
        """A copy of this plan of a call without keys: its `run` takes keys and values, `[R, T, Hkv,
        D]`, and writes them by `append`."""
        plan = copy.copy(self)
        plan._append, plan._submit, plan.direct = append, None, None
        plan._bind()
        return plan

    def _bind(self) -> None:
        """Bind the direct launches, if every kernel has been launched by Triton before."""
        launches, slots = self._launches, self._slots
        if self._append is not None and not self._append.is_direct:
            return
        if launches.write is not None and launches.write.launch is not None:
            if not launches.write.launch.is_direct:
                return
        for part, batch in (
            (launches.decode, self._decode_batch),
            (launches.prefill, self._prefill_batch),
        ):
            if part is not None and (batch is None or not part.is_direct(batch)):
                return
        if (self._rows[0] | self._rows[1]) & ALIGNMENT:
            return  # the first row of the prefill part is not aligned
        writes: list[tuple[BoundLaunches, int]] = []
        if launches.write is not None and slots is not None:
            writes = [(launches.write.bind(slots.data_ptr(), True), 0)]
        if self._append is not None:
            writes = [(self._append.bind(), 0)]
        rows = dict(zip((QUERY, OUT, LSE), self._rows, strict=True))
        parts = [(bound, rows if part else {}) for bound, part in
                 (*writes, *self._bind_attention(True, True))]  # fmt: skip
        # Bound launches hold addresses: keep the memory behind them, even if a tensor is resized.
        batches = [part for part in (self._decode_batch, self._prefill_batch) if part is not None]
        tensors = [slots, *(x for part in batches for x in (*part, *part.score_tensors))]
        tensors += [x for bound, _ in parts for x in bound.kept]
        self._storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
        self._submit = bind_sequence(parts, self._index, self._num_values, self._fixed)
        self.direct = None if self._of_layer else self._submit

    def _bind_attention(self, direct: bool, aligned: bool) -> list[tuple[BoundLaunches, int]]:
        """The attention launches of both parts in order, each with its part: 0 for launches whose
        rows begin at the first row of the call, 1 for those of the prefill part of a mixed
        batch."""
        decode, prefill = self._launches.decode, self._launches.prefill
        first, second = self._decode_batch, self._prefill_batch
        if decode is None or prefill is None:
            part, batch = (decode, first) if prefill is None else (prefill, second)
            assert part is not None and batch is not None
            return [(part.bind(batch, direct, aligned), 0)]
        assert first is not None and second is not None
        bound = decode.bind(first, direct, aligned)
        if not self._launches.concurrent:
            return [(bound, 0), (prefill.bind(second, direct, aligned), 1)]
        # The prefill runs on the SMs that the decode leaves, before its splits are combined.
        attend, *combine = bound.steps
        beside = prefill.bind(second, direct, aligned, concurrent=True)  # type: ignore[call-arg]  # a Hopper prefill
        combined = [(BoundLaunches(tuple(combine)), 0)] if combine else []
        return [(bound._replace(steps=(attend,)), 0), (beside, 1), *combined]

    def _values(
        self, impl: AttentionImpl, query: Tensor, key: Tensor | None, value: Tensor | None,
        cache: PagedKVCache, output: Tensor, lse: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The values of a call, in the order of `launch.sequence`."""
        return (
            query, cache.key_cache, cache.value_cache, output, lse, key, value,
            *impl.per_head_tensors, cache.k_scale, cache.v_scale, *impl.layer_score_tensors,
        )  # fmt: skip

    def _run_by_triton(
        self, impl: AttentionImpl, query: Tensor, key: Tensor | None, value: Tensor | None,
        cache: PagedKVCache, output: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """The same kernels launched by Triton; plain kernels where addresses are not aligned and
        the prepared ones need alignment."""
        spec, launches = self._spec, self._launches
        q_and_caches = (
            query.data_ptr()
            | output.data_ptr()
            | cache.key_cache.data_ptr()
            | cache.value_cache.data_ptr()
        )
        aligned = not q_and_caches & ALIGNMENT and not any(x & ALIGNMENT for x in self._rows[:2])
        if not aligned and any(part.needs_alignment for part in launches.parts):
            self._plain(impl, query, key, value, cache, output, lse).run(
                impl, query, key, value, cache, output, lse
            )
            return
        query, key, value, output = _per_head(spec, query, key, value, output)
        write, split = launches.write, self._split
        with chips.device_guard(query):
            values = list(self._values(impl, query, key, value, cache, output, lse))
            if write is not None and key is not None and value is not None:
                new = key.data_ptr() | value.data_ptr()
                write_aligned = not (q_and_caches | new) & ALIGNMENT
                given = _with_bytes(values) if write.as_bytes else values
                write.bind(self._slots, False, write_aligned).run(0, given)
            if any(part.as_bytes for part in launches.parts):
                values = _with_bytes(values)
            for bound, part in self._bind_attention(False, aligned):
                if split:
                    rows = slice(split, None) if part else slice(None, split)
                    for source in (QUERY, OUT, LSE):
                        x = (query, None, None, output, lse)[source]
                        values[source] = None if x is None else x[rows]
                bound.run(0, values)
        if self._submit is None:
            self._bind()

    def _plain(
        self, impl: AttentionImpl, query: Tensor, key: Tensor | None, value: Tensor | None,
        cache: PagedKVCache, output: Tensor, lse: Tensor | None,
    ) -> TritonPlan:  # fmt: skip
        """The plan of the same calls with the plain kernels only."""
        if self._fallback is None:
            metadata = self._metadata()
            assert metadata is not None  # the caller holds the batch
            query, key, value, output = _per_head(self._spec, query, key, value, output)
            self._fallback = TritonPlan(
                impl, self._signature, query, key, value, cache, metadata, output, lse, "portable"
            )  # fmt: skip
        return self._fallback


def _fixed_values(impl: AttentionImpl, cache: PagedKVCache) -> dict[Source, Any]:
    """Slopes, sinks and scales that are no tensors: part of the signature of a call. Tensors are
    read at each call."""
    spec = impl.spec
    scales = {K_SCALE: cache.k_scale, V_SCALE: cache.v_scale}
    fixed = {source: scale for source, scale in scales.items() if not isinstance(scale, Tensor)}
    return fixed if spec.has_alibi or spec.has_sink else {**fixed, SLOPES: None, SINKS: None}


def _with_bytes(values: list[Any]) -> list[Any]:
    """The values of a call with caches of float8 as bytes."""
    changed = list(values)
    for source in (KEY_CACHE, VALUE_CACHE):
        changed[source] = values[source].view(torch.uint8)
    return changed


def _per_head(
    spec: AttentionSpec, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Flat or per-head tensors as per-head views."""
    return (
        query.view(-1, spec.num_heads, spec.head_size),
        None if key is None else key.view(-1, spec.num_kv_heads, spec.head_size),
        None if value is None else value.view(-1, spec.num_kv_heads, spec.head_size_v),
        output.view(-1, spec.num_heads, spec.head_size_v),
    )


def _part_batches(metadata: TritonMetadata) -> tuple[BatchTensors | None, BatchTensors | None]:
    """The tensors of the decode part and of the prefill part; an empty batch is one prefill."""

    def tensors(part: TritonMetadata) -> BatchTensors:
        flags = part.causal if isinstance(part.causal, Tensor) else None
        return BatchTensors(
            part.query_start_loc, part.seq_lens, part.block_table, flags, part.query_bias,
            part.workspace, part.counters, part.max_seq_len,
            tuple((part.score_tensors or {}).values()),
        )  # fmt: skip

    if metadata.num_prefills == 0 and metadata.num_decodes:
        return tensors(metadata), None
    if metadata.num_decodes == 0:
        return None, tensors(metadata)
    decode, prefill = metadata.decode_metadata, metadata.prefill_metadata
    assert decode is not None and prefill is not None
    return tensors(decode), tensors(prefill)


def _prepare(
    impl: AttentionImpl,
    signature: Any,
    call: _Call,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    parts: tuple[BatchTensors | None, BatchTensors | None],
    kernels: str,
) -> _Launches:
    """The launches of a call signature over batches like this one. Cached."""
    decodes, prefills = parts
    slots, limits = metadata.slot_mapping, metadata.scheduler.limits
    causal = metadata.causal if isinstance(metadata.causal, bool) else None
    schedule = concurrent = None
    if decodes is not None:
        schedule = metadata.decode_schedule
        if kernels == "portable":
            schedule = schedule._replace(uses_hopper=False)
        elif prefills is not None:
            concurrent = metadata.concurrent_schedule
    signature = (signature, kernels, causal)
    key = (
        "step", signature, metadata.num_decodes, metadata.num_decode_tokens, schedule, concurrent,
        None if decodes is None else batch_signature(decodes),
        None if prefills is None else (batch_signature(prefills), metadata.max_query_len),
        None if slots is None else (slots.dtype, slots.shape, slots.stride()),
    )  # fmt: skip
    found: _Launches | None = LAUNCHES.get(key)
    if found is not None and (found.limits is limits or found.limits == limits):
        return found
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
    decode = prefill = None
    runs_beside = False
    # A part has fewer rows than the call, whose signature alone would also match an unsplit batch
    # of as many tokens.
    part = signature if decodes is None or prefills is None else (signature, split)
    if prefills is not None:
        rows = slice(split if decodes is not None else None, None)
        prefill = prepare_prefill(
            (part, "prefill"), *_rows_of(call, rows), prefills,
            _params_of(params, prefills), limits, metadata.max_query_len, kernels,
        )  # fmt: skip
    if decodes is not None and schedule is not None:
        tensors = _rows_of(call, slice(None, split))
        own = _params_of(params, decodes)
        if concurrent is not None and prefill is not None:
            alone = decodes._replace(counters=None)
            decode = prepare_decode((part, "concurrent"), *tensors, alone, own, limits, concurrent)
            runs_beside = can_run_concurrently(decode, prefill)
        if not runs_beside:
            decode = prepare_decode((part, "decode"), *tensors, decodes, own, limits, schedule)
    launches = _Launches(limits, write, decode, prefill, runs_beside)
    kept: _Launches = LAUNCHES.keep(key, launches)
    return kept


def _with_workspace(
    launches: _Launches, decodes: BatchTensors, device: torch.device
) -> BatchTensors:
    """The decode part with a workspace of its own where the batch's is too small (q has more rows
    than the batch has tokens), and without counters where it runs beside the prefill part."""
    if launches.concurrent:
        decodes = decodes._replace(counters=None)
    assert launches.decode is not None
    space, need = decodes.workspace, launches.decode.workspace_bytes
    if need and (space is None or space.nbytes < need):
        space = torch.empty(need // 4, dtype=torch.float32, device=device)
        decodes = decodes._replace(workspace=space)
    return decodes


def _rows_of(call: _Call, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Query, caches, output and LSE of a part of the batch."""
    lse = None if call.lse is None else call.lse[rows]
    return call.query[rows], call.key_cache, call.value_cache, call.out[rows], lse


def _params_of(params: AttentionParams, part: BatchTensors) -> AttentionParams:
    """The parameters of a part of the batch."""
    if part.causal_flags is None and part.query_bias is None:
        return params
    causal = params.causal if part.causal_flags is None else part.causal_flags
    return replace(params, causal=causal, query_bias=part.query_bias)


def _row_bytes(call: _Call, split: int) -> tuple[int, int, int]:
    """Offsets in bytes of the prefill part's first row in query, output and LSE."""
    lse = 0 if call.lse is None else split * call.lse.stride(0) * call.lse.element_size()
    query, out = call.query, call.out
    return (
        split * query.stride(0) * query.element_size(),
        split * out.stride(0) * out.element_size(),
        lse,
    )
