"""Which kernels of the `triton` backend will serve a layer on Hopper: what `explain` says beside the choice. Imports no triton."""

from __future__ import annotations

from typing import Any

from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.hopper.support import (
    HOPPER_DECODE_KEYS,
    PAIRS_PER_SM,
    decode_gaps,
    decode_rows,
    prefill_gaps,
)
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["hopper_notes"]

_SMS = 132
"""Multiprocessors of an H100 SXM, an H200 or a GH200, taken where the chip itself has not been asked. Smaller Hoppers have fewer (an H100 PCIe 114,
an H20 78): there a layer with more KV heads than that is decoded by plain Triton, unannounced."""

_ENDLESS = 1 << 30


def hopper_notes(spec: AttentionSpec, capability: tuple[int, int]) -> list[str]:
    """A line for what the Gluon kernels serve, and one for each phase that they leave to the plain ones, with the reasons."""
    layer = (
        capability,
        spec.dtype,
        spec.kv_dtype,
        (spec.head_size, spec.head_size_v),
        spec.block_size,
        spec.group_size,
    )
    features: dict[str, Any] = {
        "causal_per_request": spec.mask_kind is MaskKind.PER_REQUEST,
        "alibi": spec.has_alibi,
        "bias": spec.mask_kind is MaskKind.QUERY_BIAS,
    }
    prefill = prefill_gaps(*layer, **features)
    decode = decode_gaps(*layer, spec.num_kv_heads, _SMS, **features) or _window_gaps(spec)
    served = [*([] if prefill else ["prefill"]), *([] if decode else [_served_decodes(spec)])]
    notes = [f"Gluon kernels for SM90: {', '.join(served)}"] if served else []
    return notes + [
        f"{phase} by plain Triton: {'; '.join(gaps)}"
        for phase, gaps in (("prefill", prefill), ("decode", decode))
        if gaps
    ]


def _served_decodes(spec: AttentionSpec) -> str:
    few, many = HOPPER_DECODE_KEYS
    lengths = f"from {few} keys on, {many} with more than {PAIRS_PER_SM} (request, KV head) pairs for each multiprocessor"
    return f"decode of up to {_tokens(spec)} query tokens ({lengths})"


def _tokens(spec: AttentionSpec) -> int:
    return max(1, min(8, decode_rows(spec.head_size_v) // spec.group_size))


def _window_gaps(spec: AttentionSpec) -> list[str]:
    """A window or chunk that never shows as many keys as the Hopper decode is quicker from."""
    most = visible_bound(
        _tokens(spec),
        _ENDLESS,
        spec.visible_window.as_kernel_args(),
        spec.is_causal,
        spec.attention_chunk_size or 0,
    )
    few = HOPPER_DECODE_KEYS[0]
    return (
        [f"at most {most} keys are visible; the Hopper decode is taken from {few} on"]
        if most < few
        else []
    )
