"""Tiles of the portable kernels for a layer on a chip."""

from __future__ import annotations

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.choose_tiles import (
    TileRequest,
    choose_decode_tile,
    choose_latent_tile,
    choose_prefill_tile,
)
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.page_tiles import (
    choose_page_decode_tile,
    choose_page_prefill_tile,
)
from attnlib.ops.triton.heuristics.tiles import Tile, latents_in_place

__all__ = ["decode_tile", "prefill_tile", "tile_request"]


def tile_request(shape: LayerShape, limits: DeviceLimits, rows: int) -> TileRequest:
    """What the tile of a layer is chosen for.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.
        rows: query tokens times heads per group of the longest request.
    """
    return TileRequest(
        shape.head_sizes,
        shape.element_bytes,
        rows,
        limits.shared_memory,
        limits.products,
        shape.score_tiles,
        limits.has_fp8,
        limits.tuned,
    )


def decode_tile(
    shape: LayerShape, limits: DeviceLimits, rows: int, keys_per_sm: int | None = None
) -> Tile:
    """The tile of a decode, also over latents and over pages that hold their scales.

    Args:
        shape, limits, rows: see `tile_request`.
        keys_per_sm: class of work that the tile depends on; None takes the tile that serves any.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    if shape.page_format is not None:
        return choose_page_decode_tile(
            *(rows, shape.page_format, *shape.head_sizes, shape.query_dtype.itemsize, limits),
            values=shape.value_format,
        )
    request = tile_request(shape, limits, rows)
    if shape.latent:
        return choose_latent_tile(request, _in_place(shape, limits))
    return choose_decode_tile(request, keys_per_sm)


def prefill_tile(
    shape: LayerShape, limits: DeviceLimits, rows: int, lookups: int = 0, has_score: bool = False
) -> Tile:
    """The tile of a prefill, also over latents and over pages that hold their scales.

    Args:
        shape, limits, rows: see `tile_request`.
        lookups, has_score: see `choose_prefill_tile`.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    if shape.page_format is not None:
        return choose_page_prefill_tile(
            *(rows, shape.page_format, *shape.head_sizes, shape.query_dtype.itemsize, limits),
            values=shape.value_format,
        )
    request = tile_request(shape, limits, rows)
    if shape.latent:
        return choose_latent_tile(request, _in_place(shape, limits))
    return choose_prefill_tile(request, lookups, has_score)


def _in_place(shape: LayerShape, limits: DeviceLimits) -> bool:
    return latents_in_place(limits.capability, *shape.element_bytes, shape.aligned)
