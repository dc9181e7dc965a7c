"""The sizes that the Hopper kernels take: rows, heads and blocks.

Imports no triton, so that `attnlib explain` can name the kernels of a layer on any machine.
"""

from __future__ import annotations

import torch

from attnlib.kv_dtype import KVFormat, format_pair

__all__ = [
    "BLOCK_SIZES",
    "CHUNK_TOKENS",
    "COPIED_BYTES",
    "COPIED_GROUP",
    "COPIED_TOKENS",
    "DECODE_ROWS",
    "DECODED_PAIRS",
    "FLOAT8",
    "GATHERED_SIZES",
    "INVARIANT_KERNELS",
    "LATENT_ROWS",
    "LATENT_SIZES",
    "LENGTH_STEP",
    "MOST_OWN_KEYS",
    "PACKED_DECODE_ROWS",
    "QUANTIZED",
    "ROWS",
    "SCALED_TOKENS",
    "SHARED_HEAD_SIZE",
    "SMALL_SIZES",
    "STREAM_SIZES",
    "WARP_ROWS",
    "WIDEST",
    "copied_tokens",
    "decode_rows",
    "gathers",
    "hopper_reads",
    "latent_blocks",
    "latent_head_blocks",
    "latent_token_blocks",
    "most_copied_keys",
    "only_copies",
]

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED = (*FLOAT8, torch.int8, torch.uint8)
"""Dtypes of caches that the decode reads. Bytes (uint8) hold two elements (`hopper_reads`)."""

DECODED_PAIRS = ("int8_per_token_head,int4_per_group", "int8_per_token_head,nvfp4")
"""Pairs of `kv_dtype.KV_FORMAT_PAIRS` that the decode reads."""

ROWS = 128
"""Query rows of a prefill work item, at least: two warpgroups of 64. A row is one query head of one
query token."""

DECODE_ROWS = 64
"""Query rows of a decode, at most: the N of its WGMMAs, whose accumulators are in registers
(`decode_rows`)."""

WARP_ROWS = 8
"""Query rows per KV head that a CTA of one warp computes, at most."""

PACKED_DECODE_ROWS = 32
"""Query rows of a decode over a packed cache, at most, whose keys are in registers as well."""

LATENT_ROWS = 64
"""Query rows of a decode over latents: the M of its WGMMAs."""

LATENT_SIZES = (576, 512)
"""(D, Dv) of the decode over latents."""

STREAM_SIZES = (512, 512)
"""(D, Dv) of the kernel over two key streams."""

MOST_OWN_KEYS = 1024
"""Keys on each side of the window of the kernel over two key streams, at most."""

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
GATHERED_SIZES are copied to 16-bit rows before the prefill, also with float8 products. Warm-ups run
such a batch."""

CHUNK_TOKENS = 512
"""The same over float8 in a batch of one request, all of whose keys these queries see. On an H200
with 32/8 heads of 128 and blocks of 16, converted in the prefill / copied, in microseconds:

    over 30k:  256 tokens 447 / 439   512 514 / 468   1k 970 / 755   2k 1808 / 1396   3k 2621 / 2015
    over 8k:   256 tokens 115 / 111   512 130 / 122   1k 250 / 214   2k 465 / 393
    prompts:   1k 27.7 / 25.1         2k 81.0 / 67.5  3k 170 / 139

The prefill over these copies has a CTA for each work tile: over 30k, persistent / so, 512 tokens
424 / 409, 1k 796 / 782, 2k 1465 / 1424.
"""

OTHER_BLOCK_TOKENS = 256
"""The same over float8 in blocks that the prefill does not read, in place of the portable kernel,
which divides keys. On an H200 with 32/8 heads of 128 and blocks of 1, portable / copied, in
microseconds: over 8k 64 tokens 42.8 / 108.8, 1k 417 / 196. The bound between them is not tuned."""

SCALED_TOKENS = 4096
"""The same over pages with scales."""

COPIED_GROUP = 2
"""Query heads per KV head from which keys and values are copied: one copy of a KV head serves all
of them."""

COPIED_BYTES = 256 * 1024 * 1024
"""Scratch memory for these copies, at most."""

LENGTH_STEP = 4096
"""Step of the classes of sequence lengths, for which launches with copies are prepared."""


def copied_tokens(
    cache_bytes: int, block_size: int, in_pages: bool, num_reqs: int, window: int, chunk: int
) -> int:
    """Return the query tokens of the longest request from which keys and values are copied.

    Args:
        cache_bytes: size of an element of the cache.
        block_size: positions of its blocks.
        in_pages: whether pages hold scales.
        num_reqs: requests of the batch.
        window: keys that a query sees before its own, -1 for all.
        chunk: positions of an attention chunk, 0 for none.
    """
    if in_pages:
        return min(SCALED_TOKENS, COPIED_TOKENS)
    # Copies have all keys of a request, of which short queries see few in a window.
    sees_all = cache_bytes == 1 and window < 0 and not chunk
    if sees_all and only_copies(cache_bytes, block_size):
        return min(OTHER_BLOCK_TOKENS, COPIED_TOKENS)
    is_chunk = sees_all and num_reqs == 1
    return min(CHUNK_TOKENS, COPIED_TOKENS) if is_chunk else COPIED_TOKENS


def only_copies(cache_bytes: int, block_size: int) -> bool:
    """Return whether prefills over float8 read copies or use the portable kernel: blocks of this
    size are not among those that they read."""
    return cache_bytes == 1 and block_size not in BLOCK_SIZES


def most_copied_keys(num_kv_heads: int, head_sizes: tuple[int, int], num_reqs: int) -> int:
    """Return the keys of the longest request up to which those of a batch may be copied."""
    rows = COPIED_BYTES // (2 * num_kv_heads * sum(head_sizes))
    return rows // max(1, num_reqs) // LENGTH_STEP * LENGTH_STEP


def gathers(block_size: int) -> bool:
    """Return whether the kernels gather the rows of blocks of this size instead of reading them by
    TMA."""
    return block_size in GATHERED_SIZES


def hopper_reads(stored: KVFormat | None, values: KVFormat | None = None) -> bool:
    """Return whether the Hopper decode reads pages of this format.

    Args:
        stored: of the keys; None for caches without scales in their pages.
        values: of the values, where it is another one.
    """
    if stored is None:
        return values is None
    if values is not None:
        return format_pair(stored, values) in DECODED_PAIRS
    return not stored.is_open


def decode_rows(
    head_size_v: int, value_dtype: torch.dtype | None = None, stored: KVFormat | None = None
) -> int:
    """Return the largest number of query rows of a decode for values of a head size, stored in a
    dtype; None is 16 bits. `stored` is the format of keys with scales in their pages.

    Converted float8 tiles are in registers, too, which leaves fewer for accumulators. Keys of 4-bit
    floats are read by CTAs of one warp only.
    """
    if stored is not None and stored.elements_per_group:
        return WARP_ROWS
    if value_dtype == torch.uint8:
        return DECODE_ROWS // 4  # two accumulators, over such keys also four products
    if head_size_v <= 128:
        return DECODE_ROWS
    if head_size_v > 256:
        return DECODE_ROWS // 8
    return DECODE_ROWS // (4 if value_dtype in QUANTIZED else 2)


def latent_head_blocks(num_heads: int) -> int:
    """Return the number of blocks of query heads that kernels over latents cut a layer into: as few
    equal ones as there are with more than half of the rows, or one; 0 if there are none."""
    least, most = -(-num_heads // LATENT_ROWS), num_heads // (LATENT_ROWS // 2 + 1)
    found = (blocks for blocks in range(least, max(1, most) + 1) if num_heads % blocks == 0)
    return next(found, 0)


def latent_token_blocks(num_heads: int, max_query_len: int) -> int:
    """Return the number of blocks of query tokens of a request that a decode over latents has for
    each block of heads, which must exist.

    Args:
        num_heads: Hq.
        max_query_len: upper bound of the query lengths, in tokens.
    """
    tokens = LATENT_ROWS // (num_heads // latent_head_blocks(num_heads))
    return max(1, -(-max_query_len // tokens))


def latent_blocks(num_heads: int, max_query_len: int) -> int:
    """Return the number of blocks of query rows of a request, 0 if heads do not divide into
    blocks; arguments as of `latent_token_blocks`."""
    head_blocks = latent_head_blocks(num_heads)
    return head_blocks and head_blocks * latent_token_blocks(num_heads, max_query_len)
