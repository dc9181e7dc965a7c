"""What the Hopper prefill says it does not do, and the shapes it chooses: pure functions, asked about chips not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.device import DeviceLimits
from attnlib.ops.triton.hopper.paged_prefill import hopper_prefill_gaps
from attnlib.ops.triton.hopper.tiles import SHARED_MEMORY, choose_hopper_tile, padded_width, shared_bytes

H200 = {"num_sms": 132, "shared_memory": 232448, "shared_memory_per_sm": 233472, "capability": (9, 0), "has_fp8": True}
BF16 = torch.bfloat16


def _gaps(
    *, d: int = 128, dv: int = 128, n: int = 16, heads: int = 8, kv_heads: int = 2, dtype: torch.dtype = BF16,
    cache: torch.dtype = BF16, capability: tuple[int, int] = (9, 0), **options: Any,
) -> list[str]:  # fmt: skip
    limits = DeviceLimits(**{**H200, "capability": capability})
    query, out = torch.empty(4, heads, d, dtype=dtype), torch.empty(4, heads, dv, dtype=dtype)
    key, value = torch.empty(3, n, kv_heads, d, dtype=cache), torch.empty(3, n, kv_heads, dv, dtype=cache)
    return hopper_prefill_gaps(query, key, value, out, **{"limits": limits, "scale": 1.0, **options})


@pytest.mark.parametrize("shape", [{}, {"n": 256}, {"d": 96, "dv": 96}, {"d": 192}, {"d": 256, "dv": 256}, {"heads": 10},
                                   {"dtype": torch.float16, "cache": torch.float16}])  # fmt: skip
def test_takes_what_models_have(shape: dict[str, Any]) -> None:
    assert _gaps(**shape) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capability": (10, 0)}, "10.0"),
        ({"dtype": torch.float32, "cache": torch.float32}, "float32"),
        ({"cache": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"d": 32, "dv": 32}, "head size 32"),
        ({"d": 576, "dv": 512}, "head size 576"),
        ({"n": 48}, "block_size 48"),
        ({"heads": 256, "kv_heads": 1}, "256 query heads"),
        ({"causal": torch.ones(1, dtype=torch.bool)}, "causal per request"),
        ({"alibi_slopes": torch.ones(8)}, "alibi_slopes"),
        ({"query_bias": torch.ones(4, 4)}, "query_bias"),
        ({"k_scale": torch.ones(())}, "k_scale"),
        ({"v_scale": 0.5}, "v_scale"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_names_every_gap_with_its_value(options: dict[str, Any], words: str) -> None:
    gaps = _gaps(**options)
    assert any(words in gap for gap in gaps), gaps


def test_strides_that_tma_cannot_take_are_gaps() -> None:
    """P1, P9: views are ordinary, but boxes of 16 bytes need strides that are multiples of them."""
    limits = DeviceLimits(**H200)
    query, out = torch.empty(4, 8, 128, dtype=BF16), torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(3, 16, 2, 132, dtype=BF16)[..., :128]
    first, second = hopper_prefill_gaps(query, cache, cache, out, limits=limits, scale=1.0)
    assert "key_cache has stride 132 in dimension 2" in first and "value_cache has stride 132" in second


def test_arbitrary_strides_of_single_blocks_and_heads_are_no_gap() -> None:
    """P1: a dimension of size 1 carries any stride."""
    query, out = torch.empty(4, 8, 128, dtype=BF16), torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4096, dtype=BF16).as_strided((1, 16, 1, 128), (3, 128, 7, 1))
    assert hopper_prefill_gaps(query, cache, cache, out, limits=DeviceLimits(**H200), scale=1.0) == []


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_tiles_fit(d: int, dv: int) -> None:
    tile = choose_hopper_tile(d, dv)
    assert shared_bytes(tile, d, dv) <= SHARED_MEMORY
    assert tile.block_n <= 128 and tile.stages >= 2
    assert 2 * tile.consumer_registers + tile.producer_registers <= 504
    assert padded_width(d) >= d


def test_head_sizes_beyond_the_chip_are_refused_with_the_number() -> None:
    with pytest.raises(UnsupportedConfigError, match="head sizes 512"):
        choose_hopper_tile(512, 512)
