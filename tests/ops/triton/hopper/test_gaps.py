"""What the Hopper kernels say they do not do, and the shapes they choose: pure functions, asked about chips not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import (
    SHARED_MEMORY,
    choose_hopper_decode_tile,
    choose_hopper_tile,
    decode_shared_bytes,
    padded_width,
    shared_bytes,
)
from attnlib.ops.triton.heuristics.tile_table import work_bounds, work_class
from attnlib.ops.triton.hopper.dispatch import unsupported_strides
from attnlib.ops.triton.hopper.support import (
    HOPPER_DECODE_KEYS,
    decode_gaps,
    prefers_hopper_decode,
    prefill_gaps,
)
from attnlib.ops.triton.paged_decode import AttentionShape
from attnlib.ops.triton.paged_mixed import concurrent_ctas

BF16 = torch.bfloat16


def _prefill(
    *, d: int = 128, dv: int = 128, n: int = 16, group: int = 4, dtype: torch.dtype = BF16, cache: torch.dtype = BF16,
    capability: tuple[int, int] = (9, 0), **features: Any,
) -> list[str]:  # fmt: skip
    return prefill_gaps(capability, dtype, cache, (d, dv), n, group, **features)


def _decode(*, kv_heads: int = 8, tokens: int = 1, **options: Any) -> list[str]:
    layer = {
        "d": 128,
        "dv": 128,
        "n": 16,
        "group": 4,
        "dtype": BF16,
        "cache": BF16,
        "capability": (9, 0),
        **options,
    }
    sizes = (layer.pop("d"), layer.pop("dv"))
    facts = [layer.pop(name) for name in ("capability", "dtype", "cache")]
    return decode_gaps(
        *facts, sizes, layer.pop("n"), layer.pop("group"), kv_heads, 132, tokens, **layer
    )


LAYERS = [
    {},
    {"n": 256},
    {"d": 96, "dv": 96},
    {"d": 192},
    {"d": 256, "dv": 256},
    {"group": 5},
    {"dtype": torch.float16, "cache": torch.float16},
]


@pytest.mark.parametrize("gaps", [_prefill, _decode])
@pytest.mark.parametrize("layer", LAYERS)
def test_takes_what_models_have(layer: dict[str, Any], gaps: Callable[..., list[str]]) -> None:
    assert gaps(**layer) == []


@pytest.mark.parametrize("gaps", [_prefill, _decode])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capability": (10, 0)}, "10.0"),
        ({"dtype": torch.float32, "cache": torch.float32}, "float32"),
        ({"cache": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"d": 32, "dv": 32}, "head size 32"),
        ({"d": 576, "dv": 512}, "head size 576"),
        ({"n": 48}, "block_size 48"),
        ({"group": 256}, "256 query heads"),
        ({"causal_per_request": True}, "causal per request"),
        ({"alibi": True}, "alibi_slopes"),
        ({"bias": True}, "query_bias"),
        ({"scales": True}, "k_scale"),
    ],
)
def test_names_every_gap_with_its_value(
    options: dict[str, Any], words: str, gaps: Callable[..., list[str]]
) -> None:
    found = gaps(**options)
    assert any(words in gap for gap in found), found


def test_decode_packs_as_many_rows_as_registers_hold() -> None:
    assert _decode(group=16, tokens=4) == []
    assert "16 query heads for each KV head times 5 tokens" in _decode(group=16, tokens=5)[0]
    assert "133 KV heads" in _decode(kv_heads=133)[0]


def test_short_and_windowed_decodes_stay_with_the_plain_kernel() -> None:
    """Measured: it is the quicker one there, and for many short requests."""
    few, many = HOPPER_DECODE_KEYS
    assert prefers_hopper_decode(few, 16, 8, 132) and not prefers_hopper_decode(few - 1, 1, 8, 132)
    assert not prefers_hopper_decode(many - 1, 133, 8, 132) and prefers_hopper_decode(
        many, 256, 8, 132
    )


def test_strides_that_tma_cannot_take_are_gaps() -> None:
    """P1, P9: views are ordinary, but boxes of 16 bytes need strides that are multiples of them."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(3, 16, 2, 132, dtype=BF16)[..., :128]
    first, second = unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query)
    assert (
        "key_cache has stride 132 in dimension 2" in first
        and "value_cache has stride 132" in second
    )


def test_arbitrary_strides_of_single_blocks_and_heads_are_no_gap() -> None:
    """P1: a dimension of size 1 carries any stride."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4096, dtype=BF16).as_strided((1, 16, 1, 128), (3, 128, 7, 1))
    assert unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query) == []


def test_a_gluon_that_cannot_be_imported_is_a_reason_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names under triton.experimental move: plain Triton then serves everything."""

    def gone(name: str) -> Any:
        raise ImportError(f"no {name} in this Triton")

    monkeypatch.setattr(hopper, "import_module", gone)
    hopper._load.cache_clear()
    try:
        assert hopper.load() is None
        assert (
            hopper.import_error()
            == "ImportError: no attnlib.ops.triton.hopper.dispatch in this Triton"
        )
    finally:
        hopper._load.cache_clear()


@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_decode_tiles_fit(d: int, dv: int) -> None:
    for work in (None, *work_bounds("hopper_decode"), 1 << 20):
        tile = choose_hopper_decode_tile(d, dv, keys_per_sm=work)
        assert decode_shared_bytes(tile, d, dv) <= SHARED_MEMORY and tile.stages >= 2


def test_little_work_is_cut_into_smaller_tiles() -> None:
    """One request of 1k keys is 8 tiles of 128 keys for each KV head, where the chip holds 16 programs for each."""
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


def test_head_sizes_beyond_the_chip_are_refused_with_the_number() -> None:
    with pytest.raises(UnsupportedConfigError, match="head sizes 512"):
        choose_hopper_tile(512, 512)


def test_decodes_leave_more_of_the_chip_to_a_longer_prefill() -> None:
    """60 decodes of 4k keys beside a prefill of 8k tokens, and of 2k."""
    shape = AttentionShape(32, 8, 128, 128, BF16, BF16)
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    few, many = (
        concurrent_ctas(
            shape, chip, num_decodes=60, decode_visible=4096, prefill_tokens=tokens,
            prefill_visible=tokens, bounds=(tokens, tokens),
        )
        for tokens in (8192, 2048)
    )  # fmt: skip
    assert (few, many) == (48, 88)
