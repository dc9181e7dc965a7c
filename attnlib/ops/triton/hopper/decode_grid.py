"""The grid of a Hopper decode: workers, where their splits are combined, and the workspace."""

from __future__ import annotations

from typing import NamedTuple

import triton

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width
from attnlib.ops.triton.heuristics.splits import splits_per_load
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS

__all__ = [
    "MOST_TOKENS",
    "DecodeGrid",
    "DecodeSizes",
    "are_mostly_whole",
    "combine_tile",
    "decode_columns",
    "hopper_decode_workspace_bytes",
    "token_parts",
    "whole_requests",
    "workers_per_head",
]

_MAX_SPLITS = 511

_FEW_ROWS = 1024
"""Rows (tokens times query heads) up to which the combine kernel uses one program per row: fastest
for few rows. With many rows most programs would have nothing to combine."""

_LEAST_BUSY = 0.7
"""Share of the multiprocessors that read fast enough for all of them. 48 requests of 5k keys with 4
KV heads take 120.2 us on 96 of the 132 of an H200, without splits, and 121.9 on all. Beside a
prefill of 1k tokens, 60 requests of 3k take 192.1 us on 80 and 197.9 on 88, 30 of 4k with head size
256 242.0 and 251.4. Several query
tokens need all: 24 requests of 8 over 2k keys take 68.1 us on 96 and 61.0 on 128."""

_LEAST_BUSY_QUANTIZED = 0.9
"""The same over quantized caches, whose conversion needs more of the multiprocessors. On an H200
over e4m3, 8 KV heads: 128 requests of 2k keys take 134.0 us in 32 ranges of whole requests and
136.2 in 33; 90 of 1.5k with 5 query heads each 77.7 in 15 and 79.7 in 16, with two consumers 73.1
in 30 and 76.4 in 33."""

MOST_TOKENS = 32
"""Tokens of a program that combines splits, where most requests have one."""
_PROGRAMS_PER_SM = 4
"""Programs of a multiprocessor there, as many as it has registers for. Over latents on an H200,
with one program for each token and with these, in us: 128 requests of 2k, 2 tokens of 128 heads
303.4 and 293.6, 4 tokens of 128 heads 619.6 and 580.8."""

_MAX_LOAD_ROUNDS = 8
"""Rounds of loads, about one microsecond each, that combining one request's splits may take."""


def combine_tile(call: AttentionCall, sizes: DecodeSizes, num_ranges: int) -> dict[str, int]:
    """Tile of the combine kernel after `num_ranges` for each KV head: heads per program, splits
    loaded together, warps, and where most requests have one split tokens per program, at most."""
    if call.num_tokens * sizes.num_kv_heads * sizes.group <= _FEW_ROWS:
        return {"HEADS": 1, "STEP": 32 if sizes.head_size_v <= 128 else 16, "num_warps": 1}
    tile = {"HEADS": min(4, triton.next_power_of_2(sizes.group)), "STEP": 8, "num_warps": 4}
    are_whole = are_mostly_whole(call.batch.num_decodes, num_ranges)
    return {**tile, "TOKENS": MOST_TOKENS} if are_whole else tile


def are_mostly_whole(num_reqs: int, num_ranges: int) -> bool:
    """Whether most of the requests have one split, equal for batches up to the next power of 2."""
    return 2 * int(triton.next_power_of_2(num_reqs)) > num_ranges


def token_parts(num_tokens: int, tile: dict[str, int], programs: int, num_sms: int) -> int:
    """Parts of the tokens, for each of which a number of programs of a combine kernel with a tile
    run: as many as the chip holds at a time, because all of them wait for the last split, and
    others would begin after them."""
    resident = _PROGRAMS_PER_SM * num_sms // programs
    each = triton.cdiv(num_tokens, max(1, resident, triton.cdiv(num_tokens, tile.get("TOKENS", 1))))
    return int(triton.cdiv(num_tokens, each))


def workers_per_head(max_resident_ctas: int, num_kv_heads: int, consumers: int) -> int:
    """Consumers for each KV head: as many as the chip holds at a time, in whole CTAs."""
    workers = min(max(1, consumers * max_resident_ctas // num_kv_heads), _MAX_SPLITS)
    return workers - workers * num_kv_heads % consumers or consumers


def whole_requests(per_head: int, num_reqs: int, max_query_len: int, quantized: bool) -> int:
    """Consumers for each KV head that get equal numbers of requests, where these are at least
    `_LEAST_BUSY` (`_LEAST_BUSY_QUANTIZED`) of `per_head`; else `per_head`.

    Requests of about equal lengths then have one split each and are not combined. Others are
    divided evenly, too, over fewer consumers.
    """
    each = -(-num_reqs // per_head)
    if max_query_len > 1 or num_reqs <= per_head or num_reqs % each:
        return per_head
    least_busy = _LEAST_BUSY_QUANTIZED if quantized else _LEAST_BUSY
    if num_reqs // each < least_busy * per_head:
        return per_head
    return num_reqs // each


def decode_columns(rows: int) -> int:
    """Columns of the matrix products: a wgmma has at least 8, and the kernel needs powers of 2."""
    return max(8, int(triton.next_power_of_2(rows)))


def _combines_in_kernel(
    num_reqs: int, num_kv_heads: int, rows: int, head_size_v: int, workers: int, num_counters: int
) -> bool:
    """Whether the attention kernel combines splits itself instead of a second kernel.

    It does so with about as many requests as workers (consumers of the grid) per head: most
    requests then have one or two splits, and a request split over all workers is combined in few
    rounds of loads. On an H200 this is up to 4% faster, while one request of 8k or 32k keys is 2
    to 3% faster with a combine kernel. 48 requests of 5k keys take 120.7 instead of 124.2 us with
    33 workers per head. The bound is the power of 2 up to the workers, so that a warm-up over
    powers of 2 compiles both variants.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: Hkv.
        rows: query heads of a group times tokens.
        head_size_v: Dv.
        workers: for each KV head.
        num_counters: counters given; one per worker is needed after those of the prefill.
    """
    rounds = workers / splits_per_load(decode_columns(rows), padded_width(head_size_v))
    enough = num_counters >= PREFILL_COUNTERS + workers * num_kv_heads
    return num_reqs >= 1 << (workers.bit_length() - 1) and rounds <= _MAX_LOAD_ROUNDS and enough


def hopper_decode_workspace_bytes(
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    max_query_len: int,
    head_size_v: int,
    max_resident_ctas: int,
    consumers: int = 1,
) -> int:
    """Workspace in bytes: two float32 partial results with LSEs per worker, and one header per
    token and KV head."""
    rows = group * max_query_len
    workers = workers_per_head(max_resident_ctas, num_kv_heads, consumers) * num_kv_heads
    return 4 * (2 * workers * rows * (head_size_v + 1) + num_tokens * num_kv_heads)


class DecodeSizes(NamedTuple):
    """Sizes of a cache and of the query rows that read it."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    group: int
    head_size: int
    head_size_v: int
    rows: int
    packed: bool

    @classmethod
    def of(cls, call: AttentionCall, max_query_len: int) -> DecodeSizes:
        """The sizes of a call with queries of up to `max_query_len` tokens."""
        packed = call.key.dim() == 5
        if packed:
            num_blocks, num_kv_heads, head_size_v, block_size = call.value.shape
        else:
            num_blocks, block_size, num_kv_heads, _ = call.value.shape
            head_size_v = call.shape.head_size_v
        _, num_heads, head_size = call.query.shape
        group = num_heads // num_kv_heads
        sizes = (num_blocks, block_size, num_kv_heads, group, head_size, head_size_v)
        return cls(*sizes, group * max_query_len, packed)


class DecodeGrid(NamedTuple):
    """Workers of a launch, CTAs that run at a time, and whether the kernel combines splits."""

    workers: int
    resident: int
    in_kernel: bool

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        sizes: DecodeSizes,
        tile: DecodeTile,
        max_query_len: int,
        max_ctas: int | None,
        num_counters: int,
    ) -> DecodeGrid:
        """The grid of a call; arguments as of `decode_plan.prepare_hopper_decode`."""
        num_kv_heads, num_reqs = sizes.num_kv_heads, call.batch.num_decodes
        resident = (max_ctas or call.limits.num_sms) * max(1, tile.warps)
        per_head = workers_per_head(resident, num_kv_heads, tile.consumers)
        workers = per_head * num_kv_heads
        if tile.warps:
            return cls(workers, resident, False)
        in_kernel = _combines_in_kernel(
            num_reqs, num_kv_heads, sizes.rows, sizes.head_size_v, per_head, num_counters
        )
        quantized = call.key.dtype.itemsize == 1
        whole = whole_requests(per_head, num_reqs, max_query_len, quantized) * num_kv_heads
        workers = whole if whole % tile.consumers == 0 else workers
        return cls(workers, resident, in_kernel)
