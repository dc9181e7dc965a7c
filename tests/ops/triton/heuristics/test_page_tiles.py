"""Tiles of the kernels over pages that hold their scales."""

from __future__ import annotations

import pytest
import torch

from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.layer_tiles import decode_tile, prefill_tile
from attnlib.ops.triton.heuristics.page_tiles import (
    choose_page_decode_tile,
    choose_page_prefill_tile,
    page_ctas_per_sm,
    page_shared_bytes,
)
from tests.ops.triton.cross_compile import TARGETS


@pytest.mark.parametrize("name", list(PAGE_FORMATS))
@pytest.mark.parametrize("size", [8, 64, 128, 256, 576])
@pytest.mark.parametrize("query_bytes", [2, 4])
def test_tiles_fit_every_chip(name: str, size: int, query_bytes: int) -> None:
    stored = PAGE_FORMATS[name]
    for target in TARGETS.values():
        for choose in (choose_page_decode_tile, choose_page_prefill_tile):
            for rows in (1, 8, 64, 4096):
                tile = choose(rows, stored, size, size, query_bytes, target.limits)
                sizes = (size, size, query_bytes)
                need = page_shared_bytes(tile, stored, *sizes, target.limits.products)
                # Converted tiles of the largest heads need more than some chips have.
                large = size == 576 and (query_bytes == 4 or stored.elements_per_group)
                assert large or need <= target.limits.shared_memory, (tile, need)
                assert tile.block_m >= min(16, rows) and tile.num_stages >= 1
                assert page_ctas_per_sm(tile) * tile.num_warps <= 64


@pytest.mark.parametrize("name", list(PAGE_FORMATS))
def test_layers_over_pages_have_their_tiles(name: str) -> None:
    """Tiles of 8-bit elements without scales in the page are other ones."""
    stored = PAGE_FORMATS[name]
    shape = LayerShape(32, 8, 128, 128, torch.bfloat16, torch.uint8, 16, page_format=stored)
    for target in TARGETS.values():
        for choose, of_layer in (
            (choose_page_decode_tile, decode_tile),
            (choose_page_prefill_tile, prefill_tile),
        ):
            wanted = choose(64, stored, 128, 128, 2, target.limits)
            assert of_layer(shape, target.limits, 64) == wanted
