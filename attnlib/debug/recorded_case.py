"""The case of the conformance suite that describes a recorded call."""

from __future__ import annotations

import torch

from attnlib.kv_dtype import KVFormat
from attnlib.spec import AttentionSpec
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.case import Case

__all__ = ["case_of"]

_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def case_of(spec: AttentionSpec, batch: BatchSpec) -> Case:
    """The `Case` with the fields of a spec and a batch."""
    dtype = str(spec.dtype).removeprefix("torch.")
    kv_cache_dtype, value_cache_dtype = _name(spec.kv_format), None
    if spec.value_format != spec.kv_format:
        value_cache_dtype = _name(spec.value_format)
    return Case(
        batch=str(batch),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        block_size=spec.block_size,
        dtype=dtype,
        kv_cache_dtype="auto" if kv_cache_dtype == dtype else kv_cache_dtype,
        value_cache_dtype=value_cache_dtype,
        kv_scale_kind=spec.kv_scale_kind,
        kv_rotation=None if spec.kv_rotation is None else str(spec.kv_rotation),
        attn_type=spec.attn_type.value,
        mask=spec.mask_kind.value,
        sliding_window=spec.sliding_window,
        window=None if spec.window is None else (spec.window.left, spec.window.right),
        attention_chunk_size=spec.attention_chunk_size,
        logits_soft_cap=spec.logits_soft_cap,
        allow_fp8_queries=spec.allow_fp8_queries,
        alibi=spec.has_alibi,
        sinks=spec.has_sink,
        use_mla=spec.use_mla,
        needs_lse=spec.needs_lse,
        kv_sharing=spec.kv_sharing,
        layout=_layout_of(spec),
    )


def _name(stored: KVFormat) -> str:
    """The value of `Case.kv_cache_dtype`."""
    return stored.name if stored.scales_in_page else _FP8.get(stored.dtype, stored.name)


def _layout_of(spec: AttentionSpec) -> str:
    if spec.use_mla:
        return "ALIASED"
    return spec.kv_cache_layout or ("HND_INTERLEAVED" if spec.scales_in_page else "NHD")
