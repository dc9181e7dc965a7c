"""From how many keys on the Hopper decodes are expected to be faster than the portable ones.

Imports no triton, so that `attnlib explain` can name the kernels of a layer on any machine.
"""

from __future__ import annotations

import torch

from attnlib.ops.triton.hopper.sizes import QUANTIZED, latent_blocks

__all__ = [
    "HOPPER_DECODE_KEYS",
    "LATENT_KEYS_PER_SM",
    "LATENT_KEYS_PER_SM_ONE_REQUEST",
    "LATENT_PREFILL_KEYS",
    "PAIRS_PER_SM",
    "SHORT_DECODE_KEYS",
    "decode_keys",
    "hopper_decode_keys",
    "latent_decode_keys",
    "reads_short_decodes",
]

LATENT_KEYS_PER_SM = 64
"""Latents that each multiprocessor reads, from which the Hopper decodes over latents are faster.
Measured on an H200 (docs/kernel-notes.md), Hopper / portable in microseconds:

    128 heads:  1 x 8k 22.1 / 31.8    1 x 32k 36.3 / 70.3   8 x 4k 46.1 / 67.5   32 x 4k 84 / 206
    16 heads:   4 x 512 10.8 / 9.5    32 x 256 14.0 / 13.3  4 x 4k 17.2 / 19.5   8 x 8k 34 / 41
                32 x 1k 21.8 / 24.7   32 x 4k 51.0 / 60.5   128 x 2k 88 / 100    64 x 16k 299 / 320
"""

LATENT_KEYS_PER_SM_ONE_REQUEST = 8
"""`LATENT_KEYS_PER_SM` for a single request: 9.1 / 10.9 us for 1k latents and 16 heads, 11.7 / 13.9
for 4k, 18.4 / 19.0 for 1k and 128 heads, 18.6 / 20.8 for 2k. Fewer were not measured."""

LATENT_PREFILL_KEYS = 512
"""Longest sequence, a power of 2, up to which prefills over latents use the portable kernel. Not
tuned."""


# Measured on an NVIDIA H200 (driver 580.159.04, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-21) with
# 32/8 heads of size 128: 1 to 256 requests of 64 to 2048 keys, windows of 128 to 2048 keys, CUDA
# graphs on cold caches (docs/kernel-notes.md). benchmarks/gpu/variants.py defines one backend per
# kernel family to repeat the comparison. Microseconds, Hopper / portable:
#
#   1 request:     128 keys 4.4 / 4.4     256 keys 5.3 / 6.9
#   32 requests:   256 keys 14.2 / 17.0   window 128, head size 64: 7.8 / 5.9   256: 10.2 / 15.9
#   128 requests:  256 keys 39.4 / 47.3   1k keys 129.7 / 139.2
#   256 requests:  256 keys 73.6 / 71.2   1k keys 251.4 / 248.0   2k keys 480.9 / 481.6
#
# and `benchmarks/gpu/decode_kernels.py` on the same machine on 2026-11-22 at 3f667bb:
#
#   8 requests:    128 keys 6.2 / 5.2
#   16 requests:   128 keys 6.2 / 6.5
#   32 requests:   64 keys 7.2 / 6.5      128 keys 8.3 / 10.0     192 keys 11.7 / 12.2
#   128 requests:  64 keys 20.7 / 16.1    128 keys 23.1 / 24.0    192 keys 31.1 / 32.0
#   256 requests:  128 keys 40.4 / 41.8
#   head size 64, 8 query heads per KV head, 32 requests: 128 keys 7.5 / 5.6   192 keys 9.0 / 6.7
#
# No bound is sharp: nothing was measured between 128 and 256 requests.

HOPPER_DECODE_KEYS = (256, 2048)
"""Visible keys from which the Hopper decode is the faster one: in batches of at most PAIRS_PER_SM
(request, KV head) pairs per multiprocessor, and in larger batches."""

SHORT_DECODE_KEYS = 128
"""The first of these bounds where there is at least one pair per multiprocessor, for heads of 65 to
128 elements."""

_QUANTIZED_DECODE_KEYS = (256, 1024)
"""`HOPPER_DECODE_KEYS` over a quantized cache. On an H200, 256 requests of 1k keys in float8 took
145 us, the portable kernel 295 us."""

_SHORT_QUANTIZED_DECODE_KEYS = (256, 64)
"""The same for heads of 65 to 128 elements. On an H200 with 32/8 heads of 128, Hopper / portable in
microseconds (benchmarks/results/h200/short_quantized_decodes.json):

    float8:  32 x 128 8.3 / 8.5   128 x 128 17.8 / 29.8   256 x 64 21.7 / 41.6
             256 x 256 42.9 / 118   512 x 128 55.9 / 110   200 x 500 63.3 / 172
    int8:    512 x 128 75.0 / 100   200 x 500 66.8 / 109
    int4:    512 x 128 41.8 / 96.7   200 x 500 63.0 / 174
"""

PAIRS_PER_SM = 8
"""(Request, KV head) pairs per multiprocessor up to which the first bound applies."""


def decode_keys(cache_dtype: torch.dtype | None, head_size: int) -> tuple[int, int]:
    """Return the bounds of `HOPPER_DECODE_KEYS` for a layer."""
    if cache_dtype not in QUANTIZED:
        return HOPPER_DECODE_KEYS
    short = reads_short_decodes(head_size)
    return _SHORT_QUANTIZED_DECODE_KEYS if short else _QUANTIZED_DECODE_KEYS


def reads_short_decodes(head_size: int) -> bool:
    """Return whether `SHORT_DECODE_KEYS` applies to a layer."""
    return 64 < head_size <= 128


def hopper_decode_keys(
    num_reqs: int,
    num_kv_heads: int,
    num_sms: int,
    cache_dtype: torch.dtype | None = None,
    head_size: int = 128,
) -> int:
    """Return the visible keys from which the Hopper decode is expected to be faster than the
    portable one.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: Hkv.
        num_sms: multiprocessors of the chip.
        cache_dtype: of the cache; None is 16 bits.
        head_size: D.
    """
    few, many = decode_keys(cache_dtype, head_size)
    pairs = num_reqs * num_kv_heads
    if pairs > PAIRS_PER_SM * num_sms:
        return many
    short = pairs >= num_sms and reads_short_decodes(head_size)
    return SHORT_DECODE_KEYS if short else few


def latent_decode_keys(
    num_reqs: int, num_heads: int, max_query_len: int, num_sms: int
) -> int | None:
    """Return the visible keys from which the Hopper decode over latents is expected to be faster
    than the portable one; None if it never is.

    Args:
        num_reqs: requests of the batch.
        num_heads: Hq.
        max_query_len: upper bound of the query lengths.
        num_sms: multiprocessors of the chip.
    """
    blocks = latent_blocks(num_heads, max_query_len)
    if not blocks:
        return None
    keys = LATENT_KEYS_PER_SM if num_reqs > 1 else LATENT_KEYS_PER_SM_ONE_REQUEST
    return -(-keys * num_sms // max(1, num_reqs * blocks))
