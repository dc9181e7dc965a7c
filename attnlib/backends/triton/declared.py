"""What batches within declared limits need: scratch memory, and the batches of a warm-up."""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.backends.triton.scheduler import Scheduler
from attnlib.ops.triton.heuristics.hopper_tiles import SHORT_CONTEXT
from attnlib.ops.triton.heuristics.splits import (
    LEAST_DIVIDED_KEYS,
    MOST_PREFILL_ROWS,
    paged_decode_workspace_bytes,
    prefill_splits,
    prefill_workspace_bytes,
)
from attnlib.ops.triton.heuristics.tile_table import work_bounds
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.hopper.latent_tiles import FEW_KEYS, FEW_PACKED_KEYS
from attnlib.ops.triton.hopper.preference import SHORT_DECODE_KEYS, decode_keys
from attnlib.ops.triton.hopper.sizes import (
    LATENT_ROWS,
    copied_tokens,
    gathers,
    latent_head_blocks,
    most_copied_keys,
)
from attnlib.workspace import BatchLimits

__all__ = ["decode_bytes", "prefill_bytes", "seq_len_bounds", "warmup_lengths"]


def decode_bytes(scheduler: Scheduler, limits: BatchLimits, longest_decode: int) -> int:
    """The most scratch memory that decodes within the limits need. Splits fall as requests rise, so
    every number of requests is considered.

    Args:
        scheduler: of the builder.
        limits: the largest batch.
        longest_decode: most new tokens of a request of the decode part.
    """
    most, shape = 0, scheduler.shape
    for query_len in range(1, min(longest_decode, limits.max_num_tokens) + 1):
        most = max(most, scheduler.hopper_bytes(limits.max_num_tokens, query_len))
        for reqs in range(1, min(limits.max_num_reqs, limits.max_num_tokens // query_len) + 1):
            tokens = min(reqs * query_len, limits.max_num_tokens)
            if scheduler.batch_invariant:
                schedule = scheduler.decode(reqs, query_len, limits.max_seq_len, False)
                most = max(most, scheduler.workspace_bytes(schedule, tokens))
                continue
            splits = max(
                scheduler.decode(reqs, query_len, seq_len, False).num_splits
                for seq_len in _tile_edges(scheduler, reqs, limits.max_seq_len)
            )
            needed = paged_decode_workspace_bytes(
                tokens, shape.num_heads, shape.head_size_v, splits
            )
            most = max(most, needed)
    return most


def prefill_bytes(scheduler: Scheduler, limits: BatchLimits) -> int:
    """The most scratch memory that prefills within the limits need, whose keys may be divided; 0
    where none is."""
    shape, chip, dispatch, most = scheduler.shape, scheduler.limits, scheduler.dispatch(), 0
    if shape.latent and dispatch is not None and not scheduler.batch_invariant:
        most = dispatch.decode_workspace_bytes(shape, chip, limits.max_num_tokens, LATENT_ROWS)
    splits = _most_prefill_splits(scheduler, limits, limits.max_num_tokens, num_tiles=1)
    if splits == 1:
        return most
    sizes = (limits.max_num_tokens, shape.num_heads, shape.head_size_v, splits)
    return max(most, prefill_workspace_bytes(*sizes, chip.num_sms))


def _most_prefill_splits(
    scheduler: Scheduler, limits: BatchLimits, max_query_len: int, num_tiles: int
) -> int:
    """Programs that share the keys of a query tile of a prefill within the limits, at most.

    Args:
        scheduler: of the builder.
        limits: the largest batch.
        max_query_len: query tokens of the longest request.
        num_tiles: query tiles of one head block, at least.
    """
    if scheduler.batch_invariant:
        return 1
    longest, programs = limits.max_seq_len, num_tiles * scheduler.shape.num_kv_heads
    visible = scheduler.visible(max_query_len, longest, False)
    return prefill_splits(programs, longest, visible, scheduler.limits.num_sms)


def warmup_lengths(
    scheduler: Scheduler, limits: BatchLimits, longest_decode: int
) -> Iterator[tuple[int, ...]]:
    """Query lengths of the batches that divide keys, and of some that do not, over the longest
    sequences: of each class of query rows the shortest prefill, alone, behind a decode, and in a
    batch that fills the chip. Arguments as of `decode_bytes`."""
    shape, most = scheduler.shape, min(limits.max_num_tokens, limits.max_seq_len)
    many = scheduler.limits.num_sms // (2 * shape.num_kv_heads) + 1
    query_len = longest_decode + 1
    while query_len <= most:
        tiles = -(-query_len * shape.group // MOST_PREFILL_ROWS)
        if _most_prefill_splits(scheduler, limits, query_len, tiles) > 1:
            yield (query_len,)
            if limits.max_num_reqs > 1 and query_len < limits.max_num_tokens:
                yield 1, query_len
            count = min(many, limits.max_num_reqs, limits.max_num_tokens // query_len)
            if count > 1:
                yield (query_len,) * count
        query_len = next_power_of_2(query_len * shape.group) // shape.group + 1
    blocks = latent_head_blocks(shape.num_heads) if shape.latent else 0
    if blocks:  # more blocks of query rows than multiprocessors: no request is divided
        query_len = (
            LATENT_ROWS * blocks // shape.num_heads * (scheduler.limits.num_sms // blocks) + 1
        )
        if longest_decode < query_len <= most:
            yield (query_len,)
            if limits.max_num_reqs > 1 and query_len < limits.max_num_tokens:
                yield 1, query_len


def seq_len_bounds(scheduler: Scheduler, num_reqs: int, least: int, most: int) -> list[int]:
    """Both sides of every length at which another kernel or tile is chosen.

    Where tiles depend on work these are the edges between two tiles, and every power of 2, where
    keys may begin to be split. On Hopper, also the lengths from which its own decode is faster or
    has another tile. `least` and `most` are on the two sides of the one length from which a prefill
    has another kernel (`hopper_tiles.SHORT_CONTEXT`). Arguments as of
    `AttentionMetadataBuilder.seq_len_bounds`.
    """
    turns: list[int] = []
    if scheduler.limits.capability[0] == 9:
        shape = scheduler.shape
        bounds = (SHORT_DECODE_KEYS, *decode_keys(shape.cache_dtype, shape.head_size))
        turns = [keys - side for keys in bounds for side in (0, 1)]
        edges = _work_edges(scheduler, "hopper_decode", num_reqs)
        if shape.latent and shape.cache_dtype.itemsize == 1:
            few = (FEW_KEYS, FEW_PACKED_KEYS)
            edges += [keys * scheduler.limits.num_sms // num_reqs for keys in few]
        turns += [edge + side for edge in edges for side in (0, 1)]
        turns += _copied_lengths(scheduler, num_reqs, least)
        if num_reqs == 1:  # splits of a prefill, which are combined in steps of their number
            turns += [1 << bits for bits in range(LEAST_DIVIDED_KEYS.bit_length(), 32)]
    inner = {edge + side for edge in _tile_edges(scheduler, num_reqs, most) for side in (0, 1)}
    if len(inner) > 2:
        powers = range(most.bit_length())
        inner |= {(1 << exponent) - side for exponent in powers for side in (0, 1)}
    return sorted({least, most, *(bound for bound in (*inner, *turns) if least < bound < most)})


def _copied_lengths(scheduler: Scheduler, num_reqs: int, query_len: int) -> list[int]:
    """Both sides of the length up to which a prefill reads copies of keys of other elements or of
    small blocks, and both lengths between which that prefill changes."""
    shape = scheduler.shape
    size, in_pages = shape.cache_dtype.itemsize, shape.page_format is not None
    if shape.latent or not (size == 1 or gathers(shape.block_size)):
        return []
    seen = scheduler.window[0], scheduler.chunk
    if query_len < copied_tokens(size, shape.block_size, in_pages, num_reqs, *seen):
        return []
    most = most_copied_keys(shape.num_kv_heads, shape.head_sizes, num_reqs)
    return [most, most + 1, min(most, SHORT_CONTEXT), min(most, SHORT_CONTEXT) + 1]


def _tile_edges(scheduler: Scheduler, num_reqs: int, max_seq_len: int) -> list[int]:
    """The longest sequences of each decode tile: a tile for less work may split more."""
    edges = _work_edges(scheduler, "decode", num_reqs)
    return [max_seq_len, *(edge for edge in edges if 0 < edge < max_seq_len)]


def _work_edges(scheduler: Scheduler, op: str, num_reqs: int) -> list[int]:
    """The longest sequences of the classes of work that an operation's tiles depend on."""
    chip, heads = scheduler.limits, scheduler.shape.num_kv_heads
    return [bound * chip.num_sms // (num_reqs * heads) for bound in work_bounds(op, chip.tuned)]
