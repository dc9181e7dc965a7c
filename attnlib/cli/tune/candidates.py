"""Which tiles are worth a try: a pure function of the case and of what the chip can hold, the tile of today first.

The grid is small on purpose. What it leaves out either cannot fit, or never came near the best where it was tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlib.bench.case import BenchCase
from attnlib.ops.triton.heuristics.hopper_tiles import (
    SHARED_MEMORY,
    DecodeTile,
    HopperTile,
    choose_hopper_decode_tile,
    choose_hopper_tile,
    decode_shared_bytes,
    padded_width,
)
from attnlib.ops.triton.heuristics.hopper_tiles import shared_bytes as hopper_bytes
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.heuristics.tile_table import visible_class, work_class
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    choose_decode_tile,
    choose_prefill_tile,
    next_power_of_2,
    shared_bytes,
    split_head_size,
)
from attnlib.ops.triton.hopper.support import DECODE_ROWS, decode_gaps, prefill_gaps

if TYPE_CHECKING:  # it imports triton, and plans are made where there is none
    from attnlib.ops.triton.heuristics.device import DeviceLimits

__all__ = ["Group", "candidates", "group_of", "operations"]

_DECODE = (
    (64, 3, 4), (64, 2, 4), (32, 3, 4), (128, 2, 4), (32, 2, 2), (32, 4, 4), (64, 4, 4), (128, 3, 4), (64, 3, 8),
    (128, 2, 8), (32, 2, 4), (16, 4, 4),
)  # fmt: skip
_PREFILL = (
    (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3),
    (128, 32, 8, 3), (128, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (64, 32, 4, 2),
    (32, 32, 4, 2), (64, 16, 4, 2), (32, 64, 8, 2),
)  # fmt: skip
_HOPPER_DECODE = ((128, 2), (64, 4), (64, 3), (128, 3), (128, 4), (64, 2), (64, 6))
_FEW = 4


@dataclass(frozen=True)
class Group:
    """Cases that share a tile, as the conditions of a table's entry say it.

    Attributes:
        op: decode, prefill, hopper_prefill or hopper_decode.
        products, elements: how the chip multiplies, and what.
        head_size: the wider of the two, as padded.
        rows: class of rows; the most that are told apart is 128.
        block_size: N, for the Hopper prefill only.
        work: class of work, for decodes only.
        visible: class of windows, for the Hopper prefill only.
    """

    op: str
    products: str
    elements: str
    head_size: int
    rows: int
    block_size: int | None = None
    work: int | None = None
    visible: tuple[int, int | None] | None = None


def operations(case: BenchCase, limits: DeviceLimits, wanted: tuple[str, ...]) -> list[str]:
    """The operations that a case can measure tiles of, among those wanted; mixed batches measure none, they only mix."""
    if case.kind not in ("prefill", "decode"):
        return []
    return [
        op
        for op in (case.kind, f"hopper_{case.kind}")
        if op in wanted and (op == case.kind or _on_hopper(case, limits))
    ]


def _on_hopper(case: BenchCase, limits: DeviceLimits) -> bool:
    """Whether the chip's own kernel can serve the case."""
    spec, sizes = case.spec, (case.head_size, case.head_size_v or case.head_size)
    layer = (limits.capability, spec.dtype, spec.kv_dtype, sizes, case.block_size, spec.group_size)
    if case.kind == "prefill":
        return not prefill_gaps(*layer)
    return not decode_gaps(*layer, spec.num_kv_heads, limits.num_sms, case.batch.max_query_len)


def group_of(case: BenchCase, op: str, limits: DeviceLimits) -> Group:
    """The group of a case."""
    sizes = (case.head_size, case.head_size_v or case.head_size)
    spec, rows = (
        case.spec,
        min(128, max(16, next_power_of_2(case.batch.max_query_len * case.spec.group_size))),
    )
    stored = "16-bit" if spec.kv_dtype.itemsize > 1 else "fp8" if limits.has_fp8 else "fp8-bytes"
    elements = "float32" if spec.dtype.itemsize == 4 else stored
    if op == "hopper_prefill":
        width = max(map(padded_width, sizes))
        return Group(
            op,
            limits.products,
            elements,
            width,
            128,
            case.block_size,
            visible=visible_class(_window(case)),
        )
    if op == "hopper_decode":
        return Group(
            op,
            limits.products,
            elements,
            max(map(padded_width, sizes)),
            DECODE_ROWS,
            None,
            _work(case, limits),
        )
    width = max(sum(split_head_size(size)) for size in sizes)
    if op == "prefill":
        return Group(op, limits.products, elements, width, rows)
    return Group(op, limits.products, elements, width, rows, None, _work(case, limits))


def _work(case: BenchCase, limits: DeviceLimits) -> int:
    """The class of work of a decode."""
    spec, batch = case.spec, case.batch
    visible = visible_bound(
        batch.max_query_len, batch.max_seq_len, spec.visible_window.as_kernel_args(), True, 0
    )
    return work_class(batch.num_reqs, spec.num_kv_heads, visible, limits.num_sms)


def _window(case: BenchCase) -> int | None:
    """Keys that one query sees at most by its window; None without one."""
    left, right = case.spec.visible_window.as_kernel_args()
    return left + right + 1 if left >= 0 and right >= 0 else None


def candidates(
    case: BenchCase, op: str, limits: DeviceLimits, quick: bool = False
) -> list[dict[str, Any]]:
    """Tiles for a case by their numbers: first the one that is chosen today, then others that the chip can hold; a few of them when `quick`."""
    sizes = (case.head_size, case.head_size_v or case.head_size)
    if op == "hopper_prefill":
        return _first(_hopper_prefill(case, sizes, limits), quick)
    if op == "hopper_decode":
        return _first(_hopper_decode(case, sizes, limits), quick)
    element_bytes = (case.spec.dtype.itemsize, case.spec.kv_dtype.itemsize)
    rows = case.batch.max_query_len * case.spec.group_size
    arguments = (*sizes, *element_bytes, rows, limits.shared_memory, limits.products)
    if op == "decode":
        work = group_of(case, op, limits).work
        today = choose_decode_tile(
            *arguments, keys_per_sm=work, native_fp8=limits.has_fp8, tuned=limits.tuned
        )
        others = [Tile(today.block_m, block_n, warps, stages) for block_n, stages, warps in _DECODE]
    else:
        today = choose_prefill_tile(*arguments, native_fp8=limits.has_fp8, tuned=limits.tuned)
        others = [
            Tile(*numbers) for numbers in _PREFILL if numbers[0] <= max(16, next_power_of_2(rows))
        ]
    fitting = (
        tile
        for tile in others
        if shared_bytes(tile, *sizes, *element_bytes, limits.products) <= limits.shared_memory
    )
    return _first((vars(tile) for tile in (today, *fitting)), quick)


def _hopper_decode(
    case: BenchCase, sizes: tuple[int, int], limits: DeviceLimits
) -> Iterator[dict[str, Any]]:
    yield vars(
        choose_hopper_decode_tile(*sizes, keys_per_sm=_work(case, limits), tuned=limits.tuned)
    )
    for block_n, stages in _HOPPER_DECODE:
        tile = DecodeTile(block_n, stages)
        if decode_shared_bytes(tile, *sizes) <= SHARED_MEMORY and (
            max(sizes) <= 128 or block_n <= 64
        ):
            yield vars(tile)


def _hopper_prefill(
    case: BenchCase, sizes: tuple[int, int], limits: DeviceLimits
) -> Iterator[dict[str, Any]]:
    rows, window = case.batch.max_query_len * case.spec.group_size, _window(case)
    yield vars(
        choose_hopper_tile(
            *sizes, rows=rows, block_size=case.block_size, visible=window, tuned=limits.tuned
        )
    )
    for block_n in (128, 64) if visible_class(window)[1] is None else (64, 32, 128):
        for stages in (2, 3, 4):
            for persistent in (False, True):
                for q_stages in (2, 1) if persistent else (1,):
                    tile = HopperTile(block_n, stages, persistent=persistent, q_stages=q_stages)
                    if hopper_bytes(tile, *sizes) <= SHARED_MEMORY and (
                        max(sizes) <= 128 or block_n <= 64
                    ):
                        yield vars(tile)
                        if (
                            max(sizes) <= 64
                        ):  # a third warpgroup has the registers that smaller accumulators leave
                            yield vars(
                                dataclasses.replace(
                                    tile, consumers=3, consumer_registers=160, producer_registers=24
                                )
                            )


def _first(tiles: Iterator[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for tile in tiles:
        if tile not in found:
            found.append(dict(tile))
    return found[: _FEW + 1] if quick else found
