"""What the Hopper kernels support, as pure functions of a layer and a chip.

Imports no triton, so that `attnlib explain` can name the kernels of a layer on any machine.
"""

from __future__ import annotations

import torch

from attnlib.kv_dtype import KVFormat
from attnlib.ops.shared_decode import PRODUCT_ROWS

__all__ = [
    "BLOCK_SIZES", "COPIED_BYTES", "COPIED_GROUP", "COPIED_TOKENS", "DECODE_ROWS", "GATHERED_SIZES",
    "HOPPER_DECODE_KEYS", "INVARIANT_KERNELS", "LATENT_KEYS_PER_SM",
    "LATENT_KEYS_PER_SM_ONE_REQUEST", "LATENT_ROWS", "LATENT_SIZES", "PACKED_DECODE_ROWS",
    "PAIRS_PER_SM", "ROWS", "SHORT_DECODE_KEYS", "SMALL_SIZES", "WIDEST", "decode_keys",
    "decode_rows", "decode_unsupported_reasons", "gathers", "hopper_decode_keys", "hopper_reads",
    "invariant_unsupported_reasons", "latent_decode_keys", "latent_head_blocks",
    "latent_unsupported_reasons", "prefill_unsupported_reasons", "reads_short_decodes",
    "selected_latents_unsupported_reasons", "shared_decode_unsupported_reasons",
]  # fmt: skip

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_QUANTIZED = (*_FLOAT8, torch.int8, torch.uint8)
"""Dtypes of caches that the decode reads. Bytes (uint8) are 4-bit integers (`hopper_reads`)."""

_DECODE = "Hopper decode"

ROWS = 128
"""Query rows of a prefill work item, at least: two warpgroups of 64. A row is one query head of one
query token."""

DECODE_ROWS = 64
"""Query rows of a decode, at most: the N of its WGMMAs, whose accumulators are in registers
(`decode_rows`)."""

PACKED_DECODE_ROWS = 32
"""The same over a packed cache, whose keys are in registers as well."""

LATENT_ROWS = 64
"""Query rows of a decode over latents: the M of its WGMMAs."""

LATENT_KEYS_PER_SM = 64
"""Latents that each multiprocessor reads, from which the Hopper decodes over latents are faster.
Measured on an H200 (docs/kernel-notes.md), Hopper / portable in microseconds:

    128 heads:  1 x 8k 22.1 / 31.8    1 x 32k 36.3 / 70.3   8 x 4k 46.1 / 67.5   32 x 4k 84 / 206
    16 heads:   4 x 512 10.8 / 9.5    32 x 256 14.0 / 13.3  4 x 4k 17.2 / 19.5   8 x 8k 34 / 41
                32 x 1k 21.8 / 24.7   32 x 4k 51.0 / 60.5   128 x 2k 88 / 100    64 x 16k 299 / 320
"""

LATENT_KEYS_PER_SM_ONE_REQUEST = 8
"""The same for a single request: 9.1 / 10.9 us for 1k latents and 16 heads, 11.7 / 13.9 for 4k,
18.4 / 19.0 for 1k and 128 heads, 18.6 / 20.8 for 2k. Fewer were not measured."""

LATENT_SIZES = (576, 512)
"""(D, Dv) of the decode over latents."""

SHARED_HEAD_SIZE = 128
"""Largest head size of the decode of shared prefixes."""

INVARIANT_KERNELS = ("auto", "hopper")
"""Values of `config["kernels"]` with which batch-invariant layers use the Hopper kernels."""

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Block sizes of all kernels: they divide a key tile or are divided by it."""

SMALL_SIZES = (1, 2, 4, 8)
"""Block sizes that the prefill and the decode of 16-bit caches read, too."""

WIDEST = 512
"""Head size, at most. Above 256 the consumers of a prefill share rows and split the values."""

GATHERED_SIZES = (1, 2, 4)
"""Block sizes whose rows are gathered one by one: a TMA box has at least 8 rows."""


COPIED_TOKENS = 4096
"""Query tokens of the longest request from which keys and values of quantized caches and of
GATHERED_SIZES are copied to 16-bit rows before the prefill. Warm-ups run such a batch."""

COPIED_GROUP = 2
"""Query heads per KV head, likewise: one copy of a KV head serves all of them."""

COPIED_BYTES = 256 * 1024 * 1024
"""Scratch memory for these copies, at most."""


def gathers(block_size: int) -> bool:
    """Return whether the kernels gather the rows of blocks of this size instead of reading them by
    TMA."""
    return block_size in GATHERED_SIZES


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
128 elements of 16 bits."""

_FLOAT8_DECODE_KEYS = (256, 1024)
"""The same over a float8 cache. On an H200, 256 requests of 1k keys took 145 us, the portable
kernel 295 us; fewer keys were not measured in such batches."""

PAIRS_PER_SM = 8
"""(Request, KV head) pairs per multiprocessor up to which the first bound applies."""


def hopper_reads(stored: KVFormat | None) -> bool:
    """Return whether the Hopper decode reads pages of this format."""
    return stored is None or not stored.elements_per_group


def decode_keys(cache_dtype: torch.dtype | None) -> tuple[int, int]:
    """Return the bounds of `HOPPER_DECODE_KEYS` for a cache."""
    return _FLOAT8_DECODE_KEYS if cache_dtype in _QUANTIZED else HOPPER_DECODE_KEYS


def reads_short_decodes(head_size: int, cache_dtype: torch.dtype | None) -> bool:
    """Return whether `SHORT_DECODE_KEYS` applies to a layer."""
    return 64 < head_size <= 128 and cache_dtype not in _FLOAT8


def decode_rows(head_size_v: int, cache_dtype: torch.dtype | None = None) -> int:
    """Return the largest number of query rows of a decode for values of a head size.

    Converted float8 tiles are in registers, too, which leaves fewer for accumulators.
    """
    if cache_dtype == torch.uint8:
        return DECODE_ROWS // 4  # four products and two accumulators
    if head_size_v <= 128:
        return DECODE_ROWS
    if head_size_v > 256:
        return DECODE_ROWS // 8
    return DECODE_ROWS // (4 if cache_dtype in _QUANTIZED else 2)


def _layer_reasons(
    kernel: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
    small_sizes: tuple[int, ...] = (),
) -> list[str]:
    reasons = []
    is_quantized = cache_dtype in (_QUANTIZED if kernel == _DECODE else _FLOAT8)
    multiple = 16 if is_quantized else 8  # rows of the cache are read in units of 16 bytes
    if capability[0] != 9:
        reasons.append(
            f"compute capability {capability[0]}.{capability[1]}; the {kernel} needs 9.0"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"query has dtype {dtype}; the {kernel} takes float16 and bfloat16")
    if cache_dtype != dtype and not is_quantized:
        reasons.append(
            f"the cache has dtype {cache_dtype} and query {dtype}; the {kernel} needs them equal "
            "or a float8 cache"
        )
    if is_quantized and cache_dtype == torch.uint8 and head_sizes != (128, 128):
        reasons.append(f"head sizes {head_sizes}; the {kernel} takes 128 over 4-bit integers")
    for name, size in zip(("keys", "values"), head_sizes, strict=True):
        is_wide = small_sizes and not is_quantized and block_size not in GATHERED_SIZES
        most = WIDEST if is_wide else 256
        if not 64 <= size <= most or size % multiple:
            reasons.append(
                f"{name} have head size {size}; the {kernel} takes multiples of {multiple} in "
                f"[64, {most}]" + (f" over a cache of {cache_dtype}" if is_quantized else "")
            )
    sizes = BLOCK_SIZES if is_quantized else (*small_sizes, *BLOCK_SIZES)
    if block_size not in sizes:
        reasons.append(f"block_size {block_size}; the {kernel} takes {', '.join(map(str, sizes))}")
    return reasons


def _feature_reasons(
    kernel: str, causal_per_request: bool, alibi: bool, bias: bool, scales: bool
) -> list[str]:
    reasons = []
    if causal_per_request:
        reasons.append(f"causal per request: the {kernel} takes one flag for the batch")
    if alibi:
        reasons.append(f"alibi_slopes: not supported by the {kernel}")
    if bias:
        reasons.append(f"query_bias: not supported by the {kernel}")
    if scales:
        reasons.append(f"k_scale or v_scale as tensors: the {kernel} reads a cache without scales")
    return reasons


def prefill_unsupported_reasons(
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
    group: int,
    *,
    causal_per_request: bool = False,
    alibi: bool = False,
    bias: bool = False,
    scales: bool = False,
    score: bool = False,
) -> list[str]:
    """Return why the Hopper prefill does not support a layer; empty if it does.

    Args:
        capability: compute capability of the chip.
        dtype, cache_dtype: of the queries and of the cache.
        head_sizes: (D, Dv).
        block_size: N.
        group: query heads per KV head.
        causal_per_request, alibi, bias: whether the calls use these features.
        scales: whether a scale of the cache is a tensor.
        score: whether the layer has a score function.
    """
    kernel = "Hopper prefill"
    reasons = _layer_reasons(
        kernel, capability, dtype, cache_dtype, head_sizes, block_size, SMALL_SIZES
    )
    if group > ROWS:
        reasons.append(f"{group} query heads per KV head; the {kernel} takes at most {ROWS}")
    if block_size in GATHERED_SIZES and 128 < head_sizes[0] <= 192:
        reasons.append(
            f"keys have head size {head_sizes[0]}, which are kept in parts; the {kernel} gathers "
            f"undivided rows over blocks of {block_size}"
        )
    if max(head_sizes) > 256 and 64 % group:
        reasons.append(
            f"{group} query heads per KV head; with head sizes above 256, the {kernel} takes "
            "divisors of 64"
        )
    if max(head_sizes) > 256 and score:
        reasons.append(f"score function: the {kernel} takes none with head sizes above 256")
    scales = scales and cache_dtype not in _FLOAT8
    return reasons + _feature_reasons(kernel, causal_per_request, alibi, bias, scales)


def decode_unsupported_reasons(
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
    group: int,
    num_kv_heads: int,
    num_sms: int,
    max_query_len: int = 1,
    *,
    causal_per_request: bool = False,
    alibi: bool = False,
    bias: bool = False,
    scales: bool = False,
) -> list[str]:
    """Return why the Hopper decode does not support a batch; empty if it does.

    Other arguments as in `prefill_unsupported_reasons`.

    Args:
        num_kv_heads: Hkv.
        num_sms: multiprocessors of the chip.
        max_query_len: upper bound of the query lengths.
    """
    kernel = _DECODE
    reasons = _layer_reasons(
        kernel, capability, dtype, cache_dtype, head_sizes, block_size, SMALL_SIZES
    )
    most = decode_rows(head_sizes[1], cache_dtype)
    if group * max_query_len > most:
        reasons.append(
            f"{group} query heads per KV head times {max_query_len} query tokens; the {kernel} "
            f"takes at most {most} rows with head size {head_sizes[1]}"
        )
    if num_kv_heads > num_sms:
        reasons.append(
            f"{num_kv_heads} KV heads; the {kernel} takes at most one per multiprocessor, {num_sms}"
        )
    scales = scales and cache_dtype not in _QUANTIZED
    return reasons + _feature_reasons(kernel, causal_per_request, alibi, bias, scales)


def invariant_unsupported_reasons(
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
    group: int,
    num_kv_heads: int,
    num_sms: int,
    *,
    causal_per_request: bool = False,
    alibi: bool = False,
    bias: bool = False,
    scales: bool = False,
    score: bool = False,
    latent: bool = False,
) -> list[str]:
    """Return why the batch-invariant Hopper kernels do not support a layer; empty if they do.

    Other arguments as in `decode_unsupported_reasons`. No argument depends on a batch.

    Args:
        score: whether the layer has a score function.
        latent: whether the values are a prefix of the keys.
    """
    kernel = "batch-invariant Hopper kernels"
    reasons = _layer_reasons(kernel, capability, dtype, cache_dtype, head_sizes, block_size)
    if cache_dtype in _FLOAT8:
        reasons.append(f"the cache has dtype {cache_dtype}; the {kernel} need that of the query")
    if group > DECODE_ROWS:
        reasons.append(f"{group} query heads per KV head; the {kernel} take at most {DECODE_ROWS}")
    if num_kv_heads > num_sms:
        reasons.append(f"{num_kv_heads} KV heads; the {kernel} take at most {num_sms}")
    if score:
        reasons.append(f"score function: not supported by the {kernel}")
    if latent:
        reasons.append(f"values that are a prefix of the keys: not supported by the {kernel}")
    return reasons + _feature_reasons(kernel, causal_per_request, alibi, bias, scales)


def shared_decode_unsupported_reasons(
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
    group: int,
    num_kv_heads: int,
    num_sms: int,
) -> list[str]:
    """Return why the Hopper decode of shared prefixes does not support a layer; empty if it does.

    Arguments as in `decode_unsupported_reasons`.
    """
    kernel = "Hopper decode of shared prefixes"
    reasons = _layer_reasons(kernel, capability, dtype, cache_dtype, head_sizes, block_size)
    if cache_dtype != dtype:
        reasons.append(f"the cache has dtype {cache_dtype}; the {kernel} needs that of the query")
    if max(head_sizes) > SHARED_HEAD_SIZE:
        reasons.append(f"head sizes {head_sizes}; the {kernel} takes up to {SHARED_HEAD_SIZE}")
    if group > PRODUCT_ROWS:
        reasons.append(f"{group} query heads per KV head; the {kernel} takes {PRODUCT_ROWS}")
    if num_kv_heads > num_sms:
        reasons.append(f"{num_kv_heads} KV heads; the {kernel} takes at most {num_sms}")
    return reasons


def latent_head_blocks(num_heads: int) -> int:
    """Return the number of blocks of query heads that decodes over latents cut a layer into; 0 if
    heads do not divide into blocks."""
    return -(-num_heads // LATENT_ROWS) if num_heads <= LATENT_ROWS or not num_heads % 64 else 0


def latent_decode_keys(
    num_reqs: int, num_heads: int, max_query_len: int, num_sms: int
) -> int | None:
    """Return the visible keys from which the Hopper decode over latents is expected to be faster
    than the portable one; None if it never is.

    Arguments as in `hopper_decode_keys` and `latent_unsupported_reasons`.
    """
    blocks = latent_head_blocks(num_heads)
    rows = num_heads // blocks * max_query_len if blocks else 0
    if not 0 < rows <= LATENT_ROWS:
        return None
    keys = LATENT_KEYS_PER_SM if num_reqs > 1 else LATENT_KEYS_PER_SM_ONE_REQUEST
    return -(-keys * num_sms // max(1, num_reqs * blocks))


def latent_unsupported_reasons(
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
    num_heads: int,
    num_sms: int,
    max_query_len: int = 1,
    *,
    causal_per_request: bool = False,
    alibi: bool = False,
    bias: bool = False,
    scales: bool = False,
) -> list[str]:
    """Return why the Hopper decode over latents does not support a batch; empty if it does.

    Arguments as in `decode_unsupported_reasons`.
    """
    kernel, blocks = "Hopper decode over latents", latent_head_blocks(num_heads)
    sizes = (64, 64)  # checked below
    reasons = _layer_reasons(kernel, capability, dtype, cache_dtype, sizes, block_size)
    if cache_dtype in _FLOAT8:
        reasons.append(f"the cache has dtype {cache_dtype}; the {kernel} needs that of the query")
    if head_sizes != LATENT_SIZES:
        reasons.append(f"head sizes {head_sizes}; the {kernel} takes {LATENT_SIZES}")
    if not blocks or blocks > num_sms:
        reasons.append(
            f"{num_heads} query heads; the {kernel} takes up to 64, or a multiple of 64 with at "
            f"most one block per multiprocessor"
        )
    elif num_heads // blocks * max_query_len > LATENT_ROWS:
        reasons.append(
            f"{num_heads // blocks} query heads times {max_query_len} query tokens; the {kernel} "
            f"takes at most {LATENT_ROWS} rows"
        )
    return reasons + _feature_reasons(kernel, causal_per_request, alibi, bias, scales)


def selected_latents_unsupported_reasons(
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    num_heads: int,
    *,
    one_list_per_token: bool = True,
    causal_per_request: bool = False,
    alibi: bool = False,
    scales: bool = False,
) -> list[str]:
    """Return why the Hopper kernel over selected latents does not support a layer; empty if it
    does.

    Other arguments as in `latent_unsupported_reasons`.

    Args:
        one_list_per_token: whether all heads of a query token share a list that no other token has.
    """
    kernel = "Hopper kernel over selected latents"
    sizes, block_size = (64, 64), BLOCK_SIZES[0]  # sizes are checked below, any block size is read
    reasons = _layer_reasons(kernel, capability, dtype, cache_dtype, sizes, block_size)
    if cache_dtype in _FLOAT8:
        reasons.append(f"the cache has dtype {cache_dtype}; the {kernel} needs that of the query")
    if head_sizes != LATENT_SIZES:
        reasons.append(f"head sizes {head_sizes}; the {kernel} takes {LATENT_SIZES}")
    if not latent_head_blocks(num_heads):
        reasons.append(f"{num_heads} query heads; the {kernel} takes up to 64, or a multiple of 64")
    if not one_list_per_token:
        reasons.append(f"lists per query head or shared by query tokens: not read by the {kernel}")
    return reasons + _feature_reasons(kernel, causal_per_request, alibi, False, scales)


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
    few, many = decode_keys(cache_dtype)
    pairs = num_reqs * num_kv_heads
    if pairs > PAIRS_PER_SM * num_sms:
        return many
    short = pairs >= num_sms and reads_short_decodes(head_size, cache_dtype)
    return SHORT_DECODE_KEYS if short else few
