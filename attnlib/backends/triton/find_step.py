"""Finds the launches of a step over one batch, in the launch cache or by preparing them."""

from __future__ import annotations

from collections.abc import Hashable

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.launches import LayerCall, StepLaunches
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.prepare import Step, prepare_step
from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.batch_tensors import Batch, BatchTensors
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["batch_of", "find_step"]


def batch_of(metadata: TritonMetadata) -> Batch:
    """The tensors of a batch; an empty batch is one prefill."""
    decodes = prefills = None
    is_mixed = metadata.num_decodes and metadata.num_prefills
    shared = (metadata.workspace, metadata.counters, metadata.max_seq_len)
    if metadata.num_decodes:
        part = metadata.part_tensors(is_decode=True) if is_mixed else metadata
        decodes = BatchTensors.of_part(part, *shared, metadata.max_decode_query_len)
    if metadata.num_prefills or decodes is None:
        part = metadata.part_tensors(is_decode=False) if is_mixed else metadata
        prefills = BatchTensors.of_part(part, *shared, metadata.max_query_len)
    return Batch(decodes, prefills, metadata.slot_mapping)


def find_step(
    impl: AttentionImpl,
    signature: Hashable,
    call: LayerCall,
    metadata: TritonMetadata,
    batch: Batch,
    kernels: str,
    rotation: KVRotation | None,
) -> StepLaunches:
    """The launches of a call signature over batches like this one: from the launch cache, or
    prepared."""
    decodes, prefills, slots = batch
    causal, limits = metadata.causal, metadata.scheduler.limits
    schedule = concurrent = decode_form = prefill_form = None
    if decodes is not None:
        schedule, decode_form = metadata.decode_schedule, decodes.form()
        if kernels == "portable":
            schedule = schedule._replace(uses_hopper=False)
        elif prefills is not None:
            concurrent = metadata.concurrent_schedule
    if prefills is not None:
        lengths = prefills.max_query_len, prefills.length_class(call.cache.key_cache)
        prefill_form = (prefills.form(), *lengths)
    own = (signature, kernels, causal if isinstance(causal, bool) else None, rotation)
    parts = (schedule, concurrent, decode_form, prefill_form)
    written = None if slots is None else (slots.dtype, slots.shape, slots.stride())
    key = ("step", own, metadata.num_decodes, metadata.num_decode_tokens, parts, written)
    found: StepLaunches | None = LAUNCHES.get(key)
    if found is not None and (found.limits is limits or found.limits == limits):
        return found
    step = Step(impl, own, call, metadata, batch, kernels, schedule, concurrent, rotation)
    kept: StepLaunches = LAUNCHES.keep(key, prepare_step(step))
    return kept
