"""Attention of a mixed batch: the decodes and the prefills of one step.

Decodes are bound by memory and prefills by arithmetic, so on Hopper they run concurrently: the
decode kernel takes as many SMs as it needs to keep the memory busy, and the prefill starts on the
others (and on the rest, once they are free) without waiting for it. Elsewhere one runs after the
other.

POD-Attention (Kamath et al. 2025) overlaps them in one fused kernel. Here programmatic dependent
launch overlaps two kernels, and a captured CUDA graph keeps the overlap.
"""

from __future__ import annotations

from typing import TypeGuard

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.launch.run import PreparedAttention, PreparedConcurrentPrefill

__all__ = ["can_run_concurrently", "concurrent_ctas"]

_OPERATIONS_PER_BYTE = 150
"""Arithmetic operations that the chip performs while it reads one byte: about 620 TFLOP/s and
4.2 TB/s on an H200."""

_SMALL_BYTES = 64 << 20
"""Bytes of keys and values of a small decode: 4 of 11 SMs read them about 10 us later than 2 of 3,
which is how long a query tile of a few hundred keys takes. Calculated, not measured."""

_TILE_ROWS = 128
"""Query rows of a work item of the prefill, at least."""


def concurrent_ctas(
    shape: LayerShape,
    limits: DeviceLimits,
    *,
    num_decodes: int,
    decode_visible: int,
    prefill_tokens: int,
    prefill_visible: int,
    bounds: tuple[int, int],
) -> int:
    """CTAs of a decode that runs concurrently with a prefill: as few as still read at nearly full
    speed, 2 of 3 SMs. Where the prefill takes longer by these bounds, 4 of 11, so that the prefill
    has more of the chip from the beginning. Both shares were chosen on an H200, by timing 60
    decodes of 4k keys with prefills of 2k and 8k tokens and different numbers of CTAs.

    The prefill also gets that many SMs with a small decode if all of its query tiles fit on them,
    but not on fewer. On an H200, 8 decodes of 1k keys and a prefill of 300 tokens took 22.1 us with
    48 CTAs of the decode, 24.7 with 56, 27.7 with 88 and 23.8 with 32.

    Args:
        num_decodes: requests of the decode part.
        decode_visible, prefill_visible: the most keys that a request of each part sees.
        prefill_tokens: query tokens of the prefill part.
        bounds: upper bounds of the query and sequence lengths of the prefill part.
    """
    sizes = shape.head_size + shape.head_size_v
    kv_bytes = (
        num_decodes * decode_visible * shape.num_kv_heads * sizes * shape.cache_dtype.itemsize
    )
    max_query_len, max_seq_len = bounds
    keys_per_token = min(prefill_visible, max(1, max_seq_len - max_query_len // 2))
    operations = 2 * prefill_tokens * shape.num_heads * keys_per_token * sizes
    most, least = limits.num_sms * 2 // 3, limits.num_sms * 4 // 11
    if operations > _OPERATIONS_PER_BYTE * kv_bytes:
        return least
    rows = prefill_tokens * shape.num_heads // shape.num_kv_heads
    tiles = -(-rows // _TILE_ROWS) * shape.num_kv_heads
    fits = limits.num_sms - most < tiles <= limits.num_sms - least
    return least if fits and kv_bytes <= _SMALL_BYTES else most


def can_run_concurrently(
    prefill: PreparedAttention, decode: PreparedAttention
) -> TypeGuard[PreparedConcurrentPrefill]:
    """Whether prepared launches of both parts are Hopper kernels, which can overlap. A prefill of
    several kernels starts after the decode, and so does one whose counters of work items the
    decode part uses, too: batch-invariant layers compute decodes of many rows with it."""
    hopper = decode.needs_alignment and prefill.needs_alignment
    return hopper and len(prefill.kernels) == 1 and not isinstance(decode, type(prefill))
