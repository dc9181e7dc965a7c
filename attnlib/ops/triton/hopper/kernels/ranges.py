"""How decode kernels divide the key tiles of a batch into ranges.

The key tiles of all requests form one line, request after request, which is cut into ranges of
equal lengths. A range may contain the end of one request, several whole requests and the beginning
of another.

`worker_range` gives all ranges but the last one the same length. The lengths of `even_worker_range`
differ by at most one tile, so that the cuts of equal requests repeat: 24 requests of 17 tiles in 16
ranges are cut at 25, 51, 76 and 102 tiles, and every other cut is the end of a request.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = [
    "TileRange",
    "add",
    "even_begin",
    "even_index",
    "even_worker_range",
    "worker_range",
]


@gluon.jit
def add(a, b):
    """Return a + b, for scans."""
    return a + b


@gluon.jit
def _range_length(total, longest, num_reqs, num_ranges, LEAST: gl.constexpr, FEW: gl.constexpr = 0):
    """Return the tiles of a range.

    With LEAST, ranges have at least that many tiles, or up to twice as many if requests have more
    than 128 splits otherwise. Up to FEW tiles of all requests that fill at most half of the ranges
    have one each. Where all requests have the same tiles (`longest`) and ranges become
    at most 1/16 longer, they hold whole requests or equal parts of one: no range then has splits of
    two requests. For kernels whose partial results cost much.
    """
    length = (total + num_ranges - 1) // num_ranges
    if LEAST > 0:
        few_splits = gl.minimum((longest + 127) // 128, 2 * LEAST)
        least = gl.maximum(few_splits, LEAST)
        if FEW > 0:
            least = gl.where((total <= FEW) & (2 * total <= num_ranges), 1, least)
        length = gl.maximum(length, least)
        if (num_reqs > 1) & (total > 0) & (total == longest * num_reqs):
            aligned = length
            if longest < length:
                aligned = (length + longest - 1) // longest * longest
            else:
                parts = longest // length
                # The second division is rarely needed, and no key is loaded before it ends.
                if parts * length != longest:
                    part = longest // parts
                    aligned = gl.where(parts * part == longest, part, length)
            length = gl.where(16 * (aligned - length) <= length, aligned, length)
    return length


@gluon.jit
def even_begin(index, total, num_ranges, num_reqs):
    """Return where a range of a line of `total` positions begins; `total` for `num_ranges`.

    Ranges differ by at most one position, and with fewer positions than ranges the first ones have
    one each. The positions of one request are divided by one rounded length, which takes less time:
    no key is loaded before this number is known. Products fit in 32 bits up to 16 million
    positions in 264 ranges.
    """
    if num_reqs == 1:
        begin = index * ((total + num_ranges - 1) // num_ranges)
    else:
        product = index.to(gl.uint32) * total.to(gl.uint32)
        begin = (product // num_ranges.to(gl.uint32)).to(gl.int32)
        begin = gl.where(total < num_ranges, index, begin)
    return gl.minimum(begin, total)


@gluon.jit
def even_index(position, total, num_ranges, num_reqs):
    """Return the range that holds a position: the inverse of `even_begin`."""
    if num_reqs == 1:
        index = position // ((total + num_ranges - 1) // num_ranges)
    else:
        product = (position + 1).to(gl.uint32) * num_ranges.to(gl.uint32)
        index = ((product - 1) // total.to(gl.uint32)).to(gl.int32)
        index = gl.where(total < num_ranges, position, index)
    return index


@gluon.jit
def _range_begin(
    index,
    total,
    longest,
    num_reqs,
    num_ranges,
    LEAST: gl.constexpr,
    EVEN: gl.constexpr,
    FEW: gl.constexpr,
):
    """Return where the range with a number begins."""
    if EVEN:
        return even_begin(index, total, num_ranges, num_reqs)
    else:
        return index * _range_length(total, longest, num_reqs, num_ranges, LEAST, FEW)


@gluon.jit
def _first_request(
    keys, index, num_ranges, gap, LEAST: gl.constexpr, EVEN: gl.constexpr, FEW: gl.constexpr = 0
):
    """Return (positions of the line, most tiles of a request, first request of a range, positions
    before that request).

    The second value is 0 without LEAST. EVEN: ranges are those of `even_worker_range` instead of
    `worker_range`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = max(128, 32 * WARPS)
    layout: gl.constexpr = gl.BlockedLayout([LANES // (32 * WARPS)], [32], [WARPS], [0])
    num_reqs = keys.batch.num_reqs
    total = 0
    longest = 0
    request = 0
    before = 0
    if num_reqs == 1:
        # The range begins in the only request.
        total = keys.count(0, True)
        if LEAST > 0:
            longest = total
    elif num_reqs <= LANES:
        # Every request has a lane, so the lengths are loaded and summed in one pass. This latency
        # is exposed: no key can be loaded before.
        lanes = gl.arange(0, LANES, layout)
        tiles = keys.count(lanes, lanes < num_reqs)
        tiles += gl.where(tiles > 0, gap, 0)
        ends = gl.associative_scan(tiles, 0, add)
        total = gl.max(ends, 0)
        if LEAST > 0:
            longest = gl.max(tiles, 0)
        begin = _range_begin(index, total, longest, num_reqs, num_ranges, LEAST, EVEN, FEW)
        past = (ends <= begin) & (lanes < num_reqs)
        request = gl.sum(past.to(gl.int32), 0)
        before = gl.max(gl.where(past, ends, 0), 0)
    else:
        # Two passes: the total first, then the requests that end at or before the range begins.
        for base in range(0, num_reqs, LANES):
            lanes = base + gl.arange(0, LANES, layout)
            tiles = keys.count(lanes, lanes < num_reqs)
            tiles += gl.where(tiles > 0, gap, 0)
            total += gl.sum(tiles, 0)
            if LEAST > 0:
                longest = gl.maximum(longest, gl.max(tiles, 0))
        begin = _range_begin(index, total, longest, num_reqs, num_ranges, LEAST, EVEN, FEW)
        seen = 0
        for base in range(0, num_reqs, LANES):
            lanes = base + gl.arange(0, LANES, layout)
            tiles = keys.count(lanes, lanes < num_reqs)
            tiles += gl.where(tiles > 0, gap, 0)
            ends = seen + gl.associative_scan(tiles, 0, add)
            past = (ends <= begin) & (lanes < num_reqs)
            request += gl.sum(past.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(past, ends, 0), 0))
            seen += gl.sum(tiles, 0)
    return total, longest, request, before


@aggregate
class TileRange:
    """A range of the line of all key tiles.

    Fields:
        begin, end: positions of the line.
        length: positions of a range; None if ranges are even.
        total: positions of the line; None unless ranges are even.
        request: the request that has the first position.
        before: positions before that request.
    """

    begin: Value
    end: Value
    length: Value
    total: Value
    request: Value
    before: Value


@gluon.jit
def worker_range(keys, index, num_ranges, gap=0, LEAST: gl.constexpr = 0, FEW: gl.constexpr = 0):
    """Return the `TileRange` of a worker, of which all but the last have the same length.

    Args:
        keys: `KeyTiles` of the batch.
        gap: empty positions of the line after the tiles of a request.
        LEAST, FEW: see `_range_length`.
    """
    total, longest, request, before = _first_request(
        keys, index, num_ranges, gap, LEAST, False, FEW
    )
    length = _range_length(total, longest, keys.batch.num_reqs, num_ranges, LEAST, FEW)
    begin = index * length
    return TileRange(begin, gl.minimum(begin + length, total), length, None, request, before)


@gluon.jit
def even_worker_range(keys, index, num_ranges, gap):
    """Return the `TileRange` of a worker, whose length differs from that of others by at most one;
    `gap` empty positions of the line follow the tiles of a request."""
    total, _, request, before = _first_request(keys, index, num_ranges, gap, 0, True)
    begin = even_begin(index, total, num_ranges, keys.batch.num_reqs)
    end = even_begin(index + 1, total, num_ranges, keys.batch.num_reqs)
    return TileRange(begin, end, None, total, request, before)
