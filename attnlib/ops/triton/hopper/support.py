"""What the Hopper kernels take, as pure functions of facts: the operations ask them, and so does `explain`.

Imports no triton, so the card of the backend can say beforehand which calls the plain kernels will serve, and why.
"""

from __future__ import annotations

import torch

from attnlib.ops.triton.heuristics.decode_numbers import decode_numbers

__all__ = [
    "BLOCK_SIZES", "DECODE_ROWS", "HOPPER_DECODE_KEYS", "PAIRS_PER_SM", "ROWS", "decode_gaps", "decode_rows", "prefers_hopper_decode", "prefill_gaps",
]  # fmt: skip

ROWS = 128
"""Query rows of a prefill work item, at least: two warpgroups of 64. A row is one query head of one query token."""

DECODE_ROWS = 64
"""The most query rows of a decode piece: columns of its products, of which registers hold so many (`decode_rows`)."""

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Pages that divide a tile of keys or are divided by it."""

HOPPER_DECODE_KEYS = (
    decode_numbers()["hopper_keys_few_pairs"],
    decode_numbers()["hopper_keys_many_pairs"],
)
"""Keys from which the Hopper decode is the quicker one: in batches of at most PAIRS_PER_SM (request, KV head) pairs for
each multiprocessor, and in larger ones. What was measured, and what was not: `tables/decode.json`. No bound is sharp."""

PAIRS_PER_SM = decode_numbers()["hopper_pairs_per_multiprocessor"]


def decode_rows(head_size_v: int) -> int:
    """The most query rows of a decode piece, for values of a head size."""
    return DECODE_ROWS if head_size_v <= 128 else DECODE_ROWS // 2


def _shared_gaps(
    kernel: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_sizes: tuple[int, int],
    block_size: int,
) -> list[str]:
    gaps = []
    if capability[0] != 9:
        gaps.append(f"compute capability {capability[0]}.{capability[1]}; the {kernel} needs 9.0")
    if dtype not in (torch.float16, torch.bfloat16):
        gaps.append(f"query has dtype {dtype}; the {kernel} takes float16 and bfloat16")
    if cache_dtype != dtype:
        gaps.append(
            f"the cache has dtype {cache_dtype} and query {dtype}; the {kernel} needs them equal"
        )
    for name, size in zip(("keys", "values"), head_sizes, strict=True):
        if not 64 <= size <= 256 or size % 8:
            gaps.append(
                f"{name} have head size {size}; the {kernel} takes multiples of 8 in [64, 256]"
            )
    if block_size not in BLOCK_SIZES:
        gaps.append(
            f"block_size {block_size}; the {kernel} takes {', '.join(map(str, BLOCK_SIZES))}"
        )
    return gaps


def _feature_gaps(
    kernel: str, causal_per_request: bool, alibi: bool, bias: bool, scales: bool
) -> list[str]:
    gaps = []
    if causal_per_request:
        gaps.append(f"causal per request: the {kernel} takes one flag for the batch")
    if alibi:
        gaps.append(f"alibi_slopes: the {kernel} has none")
    if bias:
        gaps.append(f"query_bias: the {kernel} has none")
    if scales:
        gaps.append(f"k_scale or v_scale: the {kernel} reads a cache without scales")
    return gaps


def prefill_gaps(
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
) -> list[str]:
    """Why the Hopper prefill cannot serve such a layer; empty when it can.

    Args:
        capability: of the chip.
        dtype, cache_dtype: of queries and cache.
        head_sizes: (D, Dv).
        block_size: N.
        group: query heads for each KV head.
        causal_per_request, alibi, bias, scales: whether the calls have them.
    """
    kernel = "Hopper prefill"
    gaps = _shared_gaps(kernel, capability, dtype, cache_dtype, head_sizes, block_size)
    if group > ROWS:
        gaps.append(f"{group} query heads for each KV head; the {kernel} packs at most {ROWS}")
    return gaps + _feature_gaps(kernel, causal_per_request, alibi, bias, scales)


def decode_gaps(
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
    """Why the Hopper decode cannot serve such a step; empty when it can. Arguments as in `prefill_gaps`.

    Args:
        num_kv_heads: Hkv.
        num_sms: multiprocessors of the chip.
        max_query_len: upper bound of the query lengths.
    """
    kernel = "Hopper decode"
    gaps = _shared_gaps(kernel, capability, dtype, cache_dtype, head_sizes, block_size)
    most = decode_rows(head_sizes[1])
    if group * max_query_len > most:
        gaps.append(
            f"{group} query heads for each KV head times {max_query_len} tokens; the {kernel} packs at most {most} rows "
            f"with head size {head_sizes[1]}"
        )
    if num_kv_heads > num_sms:
        gaps.append(
            f"{num_kv_heads} KV heads; the {kernel} takes at most one for each of the {num_sms} multiprocessors"
        )
    return gaps + _feature_gaps(kernel, causal_per_request, alibi, bias, scales)


def prefers_hopper_decode(visible: int, num_reqs: int, num_kv_heads: int, num_sms: int) -> bool:
    """Whether the Hopper decode is the quicker one.

    Args:
        visible: the most keys that a request's queries see, by an upper bound.
        num_reqs: requests of the batch.
        num_kv_heads: Hkv.
        num_sms: multiprocessors of the chip.
    """
    few, many = HOPPER_DECODE_KEYS
    return visible >= (few if num_reqs * num_kv_heads <= PAIRS_PER_SM * num_sms else many)
