"""Which layers and batches the Hopper kernels support, for chips that are not available here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from attnlib.kv_dtype import PAGE_FORMATS, KVFormat
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.preference import (
    HOPPER_DECODE_KEYS,
    hopper_decode_keys,
    latent_decode_keys,
)
from attnlib.ops.triton.hopper.sizes import hopper_reads, latent_blocks, latent_head_blocks
from attnlib.ops.triton.hopper.streams_support import streams_unsupported_reasons
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    invariant_unsupported_reasons,
    latent_unsupported_reasons,
    packed_latents_unsupported_reasons,
    prefill_unsupported_reasons,
    selected_latents_unsupported_reasons,
)

BF16 = torch.bfloat16


class Chip(NamedTuple):
    """A chip with the multiprocessors of an H200."""

    capability: tuple[int, int]
    num_sms: int = 132


def _prefill(
    *,
    d: int = 128,
    dv: int = 128,
    n: int = 16,
    group: int = 4,
    dtype: torch.dtype = BF16,
    cache: torch.dtype = BF16,
    capability: tuple[int, int] = (9, 0),
    **features: Any,
) -> list[str]:
    shape = LayerShape(8 * group, 8, d, dv, dtype, cache, n)
    return prefill_unsupported_reasons(shape, CallFeatures(**features), Chip(capability))


def _decode(
    *,
    d: int = 128,
    dv: int = 128,
    n: int = 16,
    group: int = 4,
    kv_heads: int = 8,
    tokens: int = 1,
    dtype: torch.dtype = BF16,
    cache: torch.dtype = BF16,
    stored: KVFormat | None = None,
    values: KVFormat | None = None,
    capability: tuple[int, int] = (9, 0),
    **features: Any,
) -> list[str]:
    shape = LayerShape(kv_heads * group, kv_heads, d, dv, dtype, cache, n)
    shape = shape._replace(page_format=stored, value_format=values)
    return decode_unsupported_reasons(shape, CallFeatures(**features), Chip(capability), tokens)


LAYERS = [
    {},
    {"n": 256},
    {"n": 8},
    {"d": 512, "dv": 512, "group": 8},
    {"d": 320, "dv": 320, "n": 8},
    {"d": 96, "dv": 96},
    {"d": 192},
    {"d": 256, "dv": 256},
    {"group": 5},
    {"dtype": torch.float16, "cache": torch.float16},
    {"cache": torch.float8_e4m3fn, "tensor_scales": True},
    {"dtype": torch.float16, "cache": torch.float8_e5m2, "d": 256, "dv": 256},
]


@pytest.mark.parametrize("reasons_of", [_prefill, _decode])
@pytest.mark.parametrize("layer", LAYERS)
def test_supports_common_layers(
    layer: dict[str, Any], reasons_of: Callable[..., list[str]]
) -> None:
    assert reasons_of(**layer) == []


@pytest.mark.parametrize("reasons_of", [_prefill, _decode])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capability": (10, 0)}, "10.0"),
        ({"dtype": torch.float32, "cache": torch.float32}, "float32"),
        ({"cache": torch.float16}, "dtype torch.float16"),
        ({"cache": torch.float8_e4m3fn, "d": 72, "dv": 72}, "multiples of 16"),
        ({"d": 32, "dv": 32}, "head size 32"),
        ({"d": 576, "dv": 512}, "head size 576"),
        ({"n": 48}, "block_size 48"),
        ({"n": 3, "cache": torch.float8_e4m3fn}, "block_size 3"),
        ({"n": 1, "d": 512, "dv": 512}, "head size 512"),
        ({"cache": torch.float8_e4m3fn, "d": 512, "dv": 512}, "head size 512"),
        ({"group": 256}, "256 query heads"),
        ({"causal_per_request": True}, "causal per request"),
        ({"alibi": True}, "alibi_slopes"),
        ({"query_bias": True}, "query_bias"),
        ({"tensor_scales": True}, "k_scale"),
    ],
)
def test_every_reason_names_its_value(
    options: dict[str, Any], words: str, reasons_of: Callable[..., list[str]]
) -> None:
    reasons = reasons_of(**options)
    assert any(words in reason for reason in reasons), reasons


def test_integers_with_scales_in_the_page_are_read_by_the_decode() -> None:
    """M16: int8 with any head size, 4-bit integers (bytes) with heads of 128."""
    assert _decode(cache=torch.int8, tensor_scales=True, d=96, dv=96) == []
    assert _decode(cache=torch.uint8, tensor_scales=True, group=16) == []
    assert "takes 128 over 4-bit" in _decode(cache=torch.uint8, d=64, dv=64)[0]
    assert "at most 16 rows" in _decode(cache=torch.uint8, group=16, tokens=2)[0]
    assert "torch.int8" in _prefill(cache=torch.int8)[0]
    assert hopper_reads(None) and hopper_reads(PAGE_FORMATS["int4_per_group"])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_keys_of_4_bit_floats_are_read_by_ctas_of_one_warp(name: str) -> None:
    """M16: up to 8 rows, heads of 128, no score function."""
    floats: dict[str, Any] = {"cache": torch.uint8, "stored": PAGE_FORMATS[name]}
    assert hopper_reads(PAGE_FORMATS[name])
    assert _decode(**floats, tensor_scales=True, group=8) == []
    assert "at most 8 rows" in _decode(**floats, group=4, tokens=3)[0]
    assert "takes 128 over 4-bit" in _decode(**floats, d=64, dv=64)[0]
    assert f"none over {name}" in _decode(**floats, score_function=True)[0]


def test_pairs_of_formats() -> None:
    """M16: int8 keys and values of 4 bits have the limits of 4-bit integers."""
    keys, values = PAGE_FORMATS["int8_per_token_head"], PAGE_FORMATS["int4_per_group"]
    pair: dict[str, Any] = {"cache": keys.dtype, "values": values}
    assert _decode(**pair, tensor_scales=True, group=16) == []
    assert "takes 128 over 4-bit" in _decode(**pair, d=96, dv=96)[0]
    assert "at most 16 rows" in _decode(**pair, group=16, tokens=2)[0]
    assert hopper_reads(keys, values) and not hopper_reads(values, keys)
    assert not hopper_reads(keys, PAGE_FORMATS["mxfp4"]) and not hopper_reads(None, values)


def test_blocks_of_few_tokens() -> None:
    """Over float8 the decode reads them, and prefills copy them; not those that hold scales."""
    for size in (1, 2, 4, 8):
        assert _prefill(n=size) == [] and _decode(n=size) == []
        assert _decode(n=size, cache=torch.float8_e4m3fn) == []
        assert f"block_size {size}" in _prefill(n=size, cache=torch.float8_e4m3fn)[0]
        in_page = {"cache": torch.float8_e4m3fn, "stored": PAGE_FORMATS["fp8_per_token_head"]}
        assert f"block_size {size}" in _decode(n=size, **in_page)[0]


def test_decode_rows_are_limited() -> None:
    assert _decode(group=16, tokens=4) == []
    assert "16 query heads per KV head times 5 query tokens" in _decode(group=16, tokens=5)[0]
    wide = {"d": 256, "dv": 256, "group": 4}
    assert _decode(**wide, tokens=8) == []
    assert _decode(**wide, tokens=4, cache=torch.float8_e5m2) == []
    assert "at most 16 rows" in _decode(**wide, tokens=8, cache=torch.float8_e5m2)[0]
    widest = {"d": 512, "dv": 512, "group": 4}
    assert _decode(**widest, tokens=2) == []
    assert "at most 8 rows" in _decode(**widest, tokens=3)[0]
    assert "divisors of 64" in _prefill(d=512, dv=512, group=6)[0]
    assert "133 KV heads" in _decode(kv_heads=133)[0]


def test_short_and_windowed_decodes_use_the_portable_kernel() -> None:
    """Measured: it is the faster one for few keys, and for many short requests."""
    few, many = HOPPER_DECODE_KEYS
    assert [hopper_decode_keys(requests, 8, 132) for requests in (1, 16)] == [few, few]
    assert [hopper_decode_keys(requests, 8, 132) for requests in (17, 132)] == [128, 128]
    e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16
    for dtype, size in ((e4m3, 64), (bf16, 64), (bf16, 192)):  # not measured, or slower
        assert hopper_decode_keys(32, 8, 132, dtype, size) == few
    for dtype in (e4m3, torch.int8, torch.uint8):
        found = [hopper_decode_keys(requests, 8, 132, dtype) for requests in (16, 32, 132, 133)]
        assert found == [few, 128, 128, 64]
        assert hopper_decode_keys(133, 8, 132, dtype, 64) == 1024
    assert [hopper_decode_keys(requests, 8, 132) for requests in (133, 256)] == [many, many]


def test_faster_decode_kernel_changes_at_the_measured_lengths() -> None:
    """The second bound applies from 8 * 132 + 1 (request, KV head) pairs on."""
    assert [hopper_decode_keys(requests, 8, 132) for requests in (132, 133)] == [128, 2048]


def test_latents_on_hopper_need_keys() -> None:
    """As measured: enough latents for each multiprocessor; one request needs fewer."""
    for batch, keys in (
        ((1, 16, 1), 8 * 132),
        ((1, 128, 1), 8 * 132 // 2),
        ((2, 16, 1), 64 * 132 // 2),
        ((32, 128, 1), 64 * 132 // 64),
        ((32, 16, 1), 64 * 132 // 32),
        ((16, 16, 4), 64 * 132 // 16),
        ((7, 128, 1), -(-64 * 132 // 14)),
        ((32, 128, 2), 64 * 132 // 128),
        ((32, 97, 1), None),
    ):
        assert latent_decode_keys(*batch, 132) == keys, batch


def _latent(
    heads: int = 16,
    *,
    capability: tuple[int, int] = (9, 0),
    query_bias: bool = False,
    **changes: Any,
) -> list[str]:
    shape = LayerShape(heads, 1, 576, 512, BF16, BF16, 64, latent=True)._replace(**changes)
    features = CallFeatures(query_bias=query_bias)
    return latent_unsupported_reasons(shape, features, Chip(capability))


def test_latents_of_any_number_of_tokens() -> None:
    """P10: blocks of up to 64 rows: up to 64 heads of one or more tokens."""
    for heads in (1, 5, 16, 64, 80, 96, 128):
        assert _latent(heads) == []
    blocks = [latent_blocks(*sizes) for sizes in ((5, 12), (5, 13), (16, 8), (20, 7), (128, 8))]
    assert blocks == [1, 2, 2, 3, 16]
    heads = {1: 1, 64: 1, 65: 0, 69: 0, 80: 2, 96: 2, 117: 3, 128: 2, 192: 3}
    assert {number: latent_head_blocks(number) for number in heads} == heads


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 97}, "97 query heads; the Hopper kernel over latents takes up to 64"),
        ({"head_size_v": 576}, r"head sizes \(576, 576\)"),
        ({"block_size": 24}, "block_size 24"),
        ({"capability": (10, 0)}, "needs 9.0"),
        ({"query_bias": True}, "query_bias: not supported"),
    ],
)
def test_latents_that_the_portable_kernel_serves(changes: dict[str, Any], reason: str) -> None:
    """The reason names the value and the limit."""
    (found,) = _latent(**changes)
    assert re.search(reason, found)


def test_float8_latents() -> None:
    """P10, P14: also with scales in tensors; packed latents with bfloat16 queries."""
    chip, features = Chip((9, 0)), CallFeatures(tensor_scales=True)
    for cache in (torch.float8_e4m3fn, torch.float8_e5m2):
        shape = LayerShape(16, 1, 576, 512, BF16, cache, 64, latent=True)
        assert latent_unsupported_reasons(shape, features, chip) == []
        (found,) = selected_latents_unsupported_reasons(shape, CallFeatures(), chip)
        assert "needs that of the query" in found
    assert packed_latents_unsupported_reasons(shape, CallFeatures(), chip) == []
    (found,) = packed_latents_unsupported_reasons(
        shape._replace(query_dtype=torch.float16), CallFeatures(), chip
    )
    assert "takes bfloat16" in found


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({"head_size": 576}, {}, r"head sizes \(576, 512\); .* takes \(512, 512\)"),
        ({"num_heads": 97}, {}, "97 query heads"),
        ({}, {"window": (1024, 0)}, r"window \(1024, 0\) .* takes windows of up to 1024"),
        ({}, {"window": (-1, -1)}, r"window \(-1, -1\)"),
        ({}, {"window": (127, -1), "causal": False}, r"window \(127, -1\)"),
        ({"num_kv_heads": 2}, {}, "2 KV heads; .* takes one"),
        ({}, {"chunk": 64}, "chunks of 64"),
        ({}, {"one_list_per_token": False}, "lists of blocks"),
    ],
)
def test_two_streams_that_are_attended_to_separately(
    changes: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    """M17: the reason names the value and the limit; any block size is read."""
    shape = LayerShape(64, 1, 512, 512, BF16, BF16, 24, latent=True)
    window = {"window": (127, 0)}
    chip = Chip((9, 0))
    assert streams_unsupported_reasons(shape, CallFeatures(), chip, **window) == []
    assert streams_unsupported_reasons(shape, CallFeatures(), chip, (127, -1)) == []
    assert not streams_unsupported_reasons(shape, CallFeatures(), chip, (1, 9), causal=False)
    found = streams_unsupported_reasons(
        shape._replace(**changes), CallFeatures(), chip, **(window | given)
    )
    assert len(found) == 1 and re.search(reason, found[0]), found


def _invariant(
    *, d: int = 128, group: int = 4, capability: tuple[int, int] = (9, 0), **changes: Any
) -> list[str]:
    given = {name: changes.pop(name) for name in CallFeatures._fields if name in changes}
    shape = LayerShape(8 * group, 8, d, d, BF16, BF16, 16)._replace(**changes)
    return invariant_unsupported_reasons(shape, CallFeatures(**given), Chip(capability))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (8, 0)}, "needs 9.0"),
        ({"d": 264}, "[64, 256]"),
        ({"cache_dtype": torch.float8_e4m3fn}, "that of the query"),
        ({"group": 65}, "at most 64"),
        ({"alibi": True}, "alibi"),
        ({"score_function": True}, "score function"),
        ({"latent": True}, "prefix of the keys"),
    ],
)
def test_batch_invariant_kernels_serve_all_batches_of_a_layer_or_none(
    changes: dict[str, Any], reason: str
) -> None:
    """M15: the answer follows from the layer."""
    assert _invariant() == [] == _invariant(d=64, block_size=256, group=64)
    assert _invariant(d=256) == []
    assert any(reason in found for found in _invariant(**changes)), _invariant(**changes)
