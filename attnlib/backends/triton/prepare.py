"""Prepares the launches of a step: chooses kernels, tiles and grids for one kind of call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.launches import LayerCall, StepLaunches, row_bytes
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.kv_rotation import KVRotation
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import Batch, BatchTensors
from attnlib.ops.triton.cache_write import CacheWrite, prepare_write
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.launch.run import (
    PreparedAttention,
    PreparedConcurrentPrefill,
    find_launches,
)
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    NUM_VALUES,
    SINKS,
    SLOPES,
    V_SCALE,
    Source,
)
from attnlib.ops.triton.paged_mixed import can_run_concurrently
from attnlib.ops.triton.paged_prefill import Prefill
from attnlib.ops.triton.prepare_decode import Decode

__all__ = ["Step", "prepare_step"]


class Step(NamedTuple):
    """A call and its batch, of which launches are prepared.

    Attributes:
        impl: of the calling layer.
        signature: of the call.
        call: its tensors, per head.
        metadata: the batch.
        batch: its tensors.
        kernels: "auto", "hopper" or "portable".
        schedule: of the decode part; None for an empty part.
        concurrent: of the decode part while the prefill part runs, too; None where the parts run
            one after the other.
        rotation: of the heads of the cache, where decodes are to rotate queries and outputs; else
            None.
    """

    impl: AttentionImpl
    signature: Hashable
    call: LayerCall
    metadata: TritonMetadata
    batch: Batch
    kernels: str
    schedule: DecodeSchedule | None = None
    concurrent: DecodeSchedule | None = None
    rotation: KVRotation | None = None

    def params(self) -> AttentionParams:
        """The parameters of both parts."""
        params = self.impl.attention_params(self.metadata, self.call.cache)
        slopes, sinks = self.impl.per_head_tensors
        return replace(params, alibi_slopes=slopes, sinks=sinks, rotation=self.rotation)

    def part(self, params: AttentionParams, is_decode: bool, name: str) -> AttentionCall:
        """The attention of a part of the batch.

        Args:
            params: of both parts.
            is_decode: which part.
            name: of its launches in the launch cache.
        """
        decodes, prefills, _ = self.batch
        batch = decodes if is_decode else prefills
        assert batch is not None
        signature, rows, call = self.signature, slice(None), self.call
        if decodes is not None and prefills is not None:
            # A part has fewer rows than the call, whose signature alone would also match an unsplit
            # batch of as many tokens.
            split = self.metadata.num_decode_tokens
            rows = slice(None, split) if is_decode else slice(split, None)
            signature = (signature, split)
        return AttentionCall(
            call.query[rows],
            call.cache.key_cache,
            call.cache.value_cache,
            call.out[rows],
            None if call.lse is None else call.lse[rows],
            batch,
            _params_of(params, batch).of_rows(rows),
            self.metadata.scheduler.limits,
            (signature, name),
        )


class _Parts(NamedTuple):
    """The launches of both parts, and the prefill again if it runs concurrently with the decode."""

    decode: PreparedAttention | None = None
    prefill: PreparedAttention | None = None
    concurrent: PreparedConcurrentPrefill | None = None


def prepare_step(step: Step) -> StepLaunches:
    """The launches of calls like this one, over batches like this one.

    Raises:
        ContractError: tensors that the kernels cannot address.
    """
    impl, metadata = step.impl, step.metadata
    first_row = metadata.num_decode_tokens if metadata.num_prefills else 0
    sinks = impl.per_head_tensors[1]
    parts = _prepare_invariant(step) if impl.spec.batch_invariant else _prepare_parts(step)
    return StepLaunches(
        step.call,
        metadata.scheduler.limits,
        _prepare_write(step),
        *parts,
        row_offsets=row_bytes(step.call, sinks, first_row) if first_row else {},
        fixed=_fixed_values(step),
        num_values=NUM_VALUES + len(impl.layer_score_tensors),
    )


def _prepare_write(step: Step) -> CacheWrite | None:
    """The launch of the cache write; None where nothing is written."""
    (_, key, value, cache, _, _), slots = step.call, step.batch.slots
    if key is None or value is None or slots is None:
        return None
    tensors = (key, value, cache.key_cache, cache.value_cache)
    scales = (cache.k_scale, cache.v_scale)
    return prepare_write((step.signature,), *tensors, slots, *scales, step.impl.write_rotation)


def _prepare_parts(step: Step) -> _Parts:
    """The launches of decodes and prefills."""
    params, batch, schedule = step.params(), step.batch, step.schedule
    prefill = None
    if batch.prefills is not None:
        family = Prefill(step.kernels, divides_keys=batch.decodes is None)
        prefill = find_launches(family, step.part(params, False, "prefill"))
    if batch.decodes is None or schedule is None:
        return _Parts(prefill=prefill)
    if step.concurrent is not None and prefill is not None:
        call = step.part(params, True, "concurrent")
        call = replace(call, batch=call.batch._replace(counters=None))
        decode = find_launches(Decode(step.concurrent), call)
        if can_run_concurrently(prefill, decode):
            return _Parts(decode, prefill, prefill)
    return _Parts(find_launches(Decode(schedule), step.part(params, True, "decode")), prefill)


def _prepare_invariant(step: Step) -> _Parts:
    """The batch-invariant launches (M15)."""
    # Other layers do not import these kernels.
    from attnlib.ops.triton.invariant_attention import InvariantKernels

    params, batch, schedule = step.params(), step.batch, step.schedule
    prefill = None
    if batch.prefills is not None:
        call = step.part(params, False, "prefill")
        prefill = find_launches(InvariantKernels(step.kernels), call)
    if batch.decodes is None or schedule is None:
        return _Parts(prefill=prefill)
    # The number of CTAs has no effect on the results.
    concurrent = step.concurrent
    max_ctas = None if concurrent is None else concurrent.max_ctas
    call = step.part(params, True, "decode")
    invariant = InvariantKernels(step.kernels, schedule.num_splits, max_ctas)
    decode = find_launches(invariant, call)
    if concurrent is not None and prefill is not None and can_run_concurrently(prefill, decode):
        return _Parts(decode, prefill, prefill)
    return _Parts(decode, prefill)


def _fixed_values(step: Step) -> dict[Source, Any]:
    """Slopes, sinks and scales that are not tensors: part of the signature of a call. Tensors are
    read at each call."""
    spec, cache = step.impl.spec, step.call.cache
    scales = {K_SCALE: cache.k_scale, V_SCALE: cache.v_scale}
    fixed = {source: scale for source, scale in scales.items() if not isinstance(scale, Tensor)}
    has_tensors = spec.has_alibi or spec.has_sink or spec.token_sinks
    return fixed if has_tensors else {**fixed, SLOPES: None, SINKS: None}


def _params_of(params: AttentionParams, part: BatchTensors) -> AttentionParams:
    """The parameters of a part of the batch."""
    if part.causal_flags is None and part.query_bias is None:
        return params
    causal = params.causal if part.causal_flags is None else part.causal_flags
    return replace(params, causal=causal, query_bias=part.query_bias)
