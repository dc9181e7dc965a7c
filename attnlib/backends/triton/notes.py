"""Which kernels of the `triton` backend will serve a layer on Hopper: what `explain` says beside the choice. Imports no triton."""

from __future__ import annotations

from typing import Any

from attnlib.ops.triton.hopper.limits import DECODE_ROWS, HOPPER_DECODE_KEYS, decode_gaps, prefill_gaps
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["hopper_notes"]

_SMS = 132
"""Multiprocessors of the smallest Hopper in use, where the chip itself has not been asked."""


def hopper_notes(spec: AttentionSpec, capability: tuple[int, int]) -> list[str]:
    """A line for what the Gluon kernels serve, and one for each phase that they leave to the plain ones, with the reasons."""
    layer = (capability, spec.dtype, spec.kv_dtype, (spec.head_size, spec.head_size_v), spec.block_size, spec.group_size)
    features: dict[str, Any] = {
        "causal_per_request": spec.mask_kind is MaskKind.PER_REQUEST,
        "alibi": spec.has_alibi,
        "bias": spec.mask_kind is MaskKind.QUERY_BIAS,
    }
    phases = {
        "prefill": prefill_gaps(*layer, **features),
        "decode": decode_gaps(*layer, spec.num_kv_heads, _SMS, **features),
    }
    served = [phase for phase, gaps in phases.items() if not gaps]
    notes = [f"Gluon kernels for SM90: {', '.join(served)}{_long(spec) if 'decode' in served else ''}"] if served else []
    return notes + [f"{phase} by plain Triton: {'; '.join(gaps)}" for phase, gaps in phases.items() if gaps]


def _long(spec: AttentionSpec) -> str:
    tokens = min(8, DECODE_ROWS // spec.group_size)
    return f" (from {HOPPER_DECODE_KEYS[0]} keys on, up to {tokens} query tokens)"
