"""Tiles of the Hopper kernels: each fits in shared memory and registers."""

from __future__ import annotations

from typing import Any

import pytest

from attnlib.errors import UnsupportedConfigError
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops.triton.heuristics.hopper_decode_tiles import (
    MAX_WARPS,
    choose_hopper_decode_tile,
    decode_shared_bytes,
    supports_one_warp,
)
from attnlib.ops.triton.heuristics.hopper_tiles import (
    L2_BYTES,
    SHARED_MEMORY,
    HopperTile,
    choose_hopper_tile,
    choose_l2_heads,
    padded_width,
    shared_bytes,
    with_query_registers,
)
from attnlib.ops.triton.heuristics.tile_table import parse_table, work_bounds, work_class

INT8, INT4 = PAGE_FORMATS["int8_per_token_head"], PAGE_FORMATS["int4_per_group"]


@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_decode_tiles_fit(d: int, dv: int) -> None:
    for work in (None, *work_bounds("hopper_decode"), 1 << 20):
        tile = choose_hopper_decode_tile(d, dv, keys_per_sm=work)
        assert decode_shared_bytes(tile, d, dv) <= SHARED_MEMORY and tile.stages >= 2


def test_heads_that_are_no_whole_cache_lines_have_smaller_tiles() -> None:
    def keys(size: int, **options: int) -> int:
        return choose_hopper_decode_tile(size, size, keys_per_sm=1 << 16, **options).block_n

    assert [keys(size) for size in (64, 80, 96, 112, 128)] == [128, 64, 64, 64, 128]
    assert keys(96, cache_bits=8, rows=16) == keys(128, cache_bits=8, rows=16)


@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_float8_tiles_fit(d: int, dv: int) -> None:
    """Decode tiles for every class of work, and the prefill tile, which has rings of bytes too."""
    for work in (None, *work_bounds("hopper_decode"), 1 << 20):
        for rows, pairs in ((4, None), (4, 1), (16, 16), (64, 16)):
            decode = choose_hopper_decode_tile(
                d, dv, cache_bits=8, rows=rows, keys_per_sm=work, pairs_per_sm=pairs
            )
            assert decode_shared_bytes(decode, d, dv, cache_bits=8) <= SHARED_MEMORY
            # Converted tiles of 128 keys and accumulators of 64 rows do not fit in registers.
            assert decode.block_n == 64 or rows <= 32 or d == 64
    prefill = choose_hopper_tile(d, dv, cache_bytes=1)
    assert prefill.byte_stages > 0 and shared_bytes(prefill, d, dv) <= SHARED_MEMORY
    threads = 128 * prefill.consumers
    others = prefill.converter_registers + prefill.producer_registers
    if prefill.converter_warps == 2:  # they share a warpgroup with the loader warps
        others = prefill.converter_registers
    assert threads * prefill.consumer_registers + 128 * others <= 65536


def test_queries_in_registers_fit_the_register_file() -> None:
    plain = choose_hopper_tile(128, 128, cache_bytes=1)
    tile = with_query_registers(plain)
    assert tile.query_registers and not plain.query_registers
    per_cta = 2 * tile.consumer_registers + tile.converter_registers + tile.producer_registers
    assert 128 * per_cta == 65536
    for other in (choose_hopper_tile(256, 256, cache_bytes=1), choose_hopper_tile(128, 128)):
        assert with_query_registers(other) == other


def test_int4_tiles_fit() -> None:
    for rows in (1, 4, 16):
        tile = choose_hopper_decode_tile(128, 128, stored=INT4, rows=rows)
        assert decode_shared_bytes(tile, 128, 128, cache_bits=4) <= SHARED_MEMORY
    with pytest.raises(UnsupportedConfigError):
        choose_hopper_decode_tile(64, 64, stored=INT4)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_keys_of_4_bit_floats_have_ctas_of_one_warp(name: str) -> None:
    """Also where a table has another tile for them."""
    stored, wrong = PAGE_FORMATS[name], {"block_n": 32, "stages": 5}
    line = {"op": "hopper_decode", "elements": ["fp4"], "tile": wrong, "provenance": "mine"}
    table = parse_table(
        {"schema": 1, "chip": "x", "provenance": {"mine": {}}, "tiles": [line]}, "mine.json"
    )
    for tuned in (None, table):
        options: Any = {"stored": stored, "rows": 4, "tuned": tuned}
        tile = choose_hopper_decode_tile(128, 128, one_warp=True, **options)
        assert tile.warps and decode_shared_bytes(tile, 128, 128, cache_bits=4) <= SHARED_MEMORY
        with pytest.raises(UnsupportedConfigError):
            choose_hopper_decode_tile(128, 128, **options)


def test_many_requests_over_quantized_caches_have_two_consumers() -> None:
    def consumers(requests: int, keys: int, scales_in_page: bool = False) -> int:
        work, pairs = work_class(requests, 8, keys, 132), -(-requests * 8 // 132)
        return choose_hopper_decode_tile(
            128, 128, cache_bits=8, stored=INT8 if scales_in_page else None, rows=4,
            keys_per_sm=work, pairs_per_sm=pairs,
        ).consumers  # fmt: skip

    assert consumers(256, 1024) == consumers(128, 2048) == consumers(128, 8192) == 2
    assert consumers(64, 8192) == consumers(32, 4096) == consumers(8, 8192) == 1
    assert consumers(1, 1024) == consumers(32, 8192, True) == consumers(1, 1024, True) == 1
    assert consumers(128, 2048, True) == consumers(64, 8192, True) == 2


def test_little_work_has_smaller_tiles() -> None:
    """One request of 1k keys has 8 tiles of 128 keys, fewer than the 16 CTAs of each KV head."""
    few, many = (
        choose_hopper_decode_tile(128, 128, keys_per_sm=work_class(requests, 8, keys, 132))
        for requests, keys in ((1, 1024), (8, 8192))
    )
    assert (few.block_n, many.block_n) == (64, 128)


@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_tiles_fit(d: int, dv: int) -> None:
    tile = choose_hopper_tile(d, dv)
    assert shared_bytes(tile, d, dv) <= SHARED_MEMORY
    assert tile.block_n <= 128 and tile.stages >= 2
    assert 2 * tile.consumer_registers + tile.producer_registers <= 504
    assert padded_width(d) >= d


def test_unsupported_head_sizes_are_named() -> None:
    with pytest.raises(UnsupportedConfigError, match="head sizes 576"):
        choose_hopper_tile(576, 576)


def test_sections_fit_in_the_cache() -> None:
    """8 KV heads of 256 elements: 1 MiB of keys and values per head and 1024 tokens."""
    assert [choose_l2_heads(8, n << 10, 512) for n in (1, 4, 8, 32, 512)] == [8, 8, 4, 1, 1]
    assert 4 * (8 << 20) <= L2_BYTES < 8 * (8 << 20)


def test_int4_decodes_of_few_rows_have_ctas_of_one_warp() -> None:
    assert supports_one_warp((128, 128), 8) and not supports_one_warp((128, 128), 9)
    assert not supports_one_warp((96, 96), 4)
    tile = choose_hopper_decode_tile(128, 128, stored=INT4, rows=8, one_warp=True)
    assert 0 < tile.warps <= MAX_WARPS
    assert decode_shared_bytes(tile, 128, 128, cache_bits=4) <= SHARED_MEMORY
    # Score functions, and prefills that run at the same time.
    assert not choose_hopper_decode_tile(128, 128, stored=INT4, rows=8).warps


def test_values_of_129_to_192_elements_have_two_accumulators_where_keys_are_divided() -> None:
    def tile(size: int, size_v: int, **options: int) -> HopperTile:
        chosen = choose_hopper_tile(size, size_v, **options)
        assert shared_bytes(chosen, size, size_v) <= SHARED_MEMORY
        return chosen

    assert all(tile(d, dv).two_accumulators for d in (136, 192) for dv in (136, 160, 192))
    assert tile(160, 160, rows=16, visible=128).two_accumulators
    for sizes in ((192, 128), (128, 192), (200, 192), (192, 200)):
        assert not tile(*sizes).two_accumulators
    # Float8 tiles and gathered rows are undivided.
    assert not tile(160, 160, cache_bytes=1).two_accumulators
    assert not tile(160, 160, block_size=1).two_accumulators
