"""Formats of keys and of values that differ (M16)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup
from attnlib.debug.record import load_recording, save_recording
from attnlib.debug.replay import replay
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.kv_dtype import KV_FORMAT_PAIRS, PAGE_FORMATS, format_pair
from attnlib.testing.case import Case
from attnlib.testing.runner import run_materialized_case
from tests.debug.recorded_calls import captured

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=64, head_size_v=32, dtype=torch.float32,
    kv_cache_dtype="int8_per_token_head", value_cache_dtype="nvfp4",
)  # fmt: skip


def test_a_spec_with_two_formats() -> None:
    assert SPEC.scales_in_page and SPEC.is_kv_quantized
    assert format_pair(SPEC.kv_format, SPEC.value_format) == "int8_per_token_head,nvfp4"
    assert SPEC.kv_bytes_per_token == 2 * (64 + 4 + 16 + 2)
    plain = SPEC.replace(kv_cache_dtype="auto")
    assert plain.scales_in_page and plain.is_kv_quantized
    assert format_pair(plain.kv_format, plain.value_format) == "plain,nvfp4"
    same = SPEC.replace(value_cache_dtype="int8_per_token_head")
    assert same.value_cache_dtype is None and same == SPEC.replace(value_cache_dtype=None)
    fp8 = SPEC.replace(kv_cache_dtype="fp8", value_cache_dtype="fp8_e4m3")
    assert fp8.value_cache_dtype is None and not fp8.scales_in_page
    assert len(set(KV_FORMAT_PAIRS)) == len(KV_FORMAT_PAIRS) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "nvfp4", "value_cache_dtype": "int8_per_token_head"}, "no cache comb"),
        ({"kv_cache_dtype": "fp8_per_token_head", "value_cache_dtype": "nvfp4"}, "no cache comb"),
        ({"value_cache_dtype": "mxfp4"}, "use one of int8_per_token_head,int4_per_group; "),
        ({"value_cache_dtype": "mxfp4"}, "auto,mxfp4; .*mxfp4,auto .M16"),
        ({"value_cache_dtype": "fp8"}, "value_cache_dtype=float8_e4m3fn: no cache combines"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=float8_e4m3fn with value_cache_dtype=nvfp4"),
        ({"value_cache_dtype": "fp4"}, "'fp4' is not known"),
        ({"head_size_v": 40}, "head_size_v=40 must be .* of 16 for value_cache_dtype=nvfp4"),
        ({"kv_cache_dtype": "auto", "num_kv_heads": 1, "use_mla": True}, "nvfp4 stores keys and"),
    ],
)
def test_pairs_that_no_cache_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SPEC.replace(**changes)


@pytest.mark.parametrize("pair", ["int8_per_token_head,nvfp4", "auto,int4_per_group"])
def test_a_cache_of_two_formats(pair: str) -> None:
    keys, values = pair.split(",")
    spec = SPEC.replace(kv_cache_dtype=keys, value_cache_dtype=values, block_size=5)
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    assert cache.pages is not None and (cache.head_size, cache.head_size_v) == (64, 32)
    stored = (PAGE_FORMATS.get(keys), PAGE_FORMATS[values])
    assert cache.page_formats == stored and cache.format_name.endswith(f",{values}")
    assert len(cache.block_views) == 3 + (stored[0] is not None)
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    new = torch.randn(20, 2, 64)
    layer.impl.write_kv(new, new[..., :32], cache, torch.arange(20))
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(again.pages, cache.pages) and again.page_formats == stored
    other = attnlib.PagedKVCache.allocate(spec, 4, "cpu", "NHD_INTERLEAVED")
    cache.swap_blocks(other, [(1, 2)])
    for mine, theirs in zip(cache.block_views, other.block_views, strict=True):
        assert torch.equal(mine[1].contiguous().view(torch.uint8),
                           theirs[2].contiguous().view(torch.uint8))  # fmt: skip
    one = attnlib.PagedKVCache.allocate(spec.replace(value_cache_dtype=None), 4, "cpu")
    with pytest.raises(ContractError, match="swap_blocks needs caches of one kind"):
        cache.swap_blocks(one, [(1, 2)])
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [1], [[0]], 5, "cpu")
    step = layer.backend.make_builder(spec, "cpu").build(0, common)
    with pytest.raises(ContractError, match=f"the spec says .*,{values}"):
        layer(torch.randn(1, 4, 64), new[:1], new[:1, :, :32], one, step)


def test_pools_hold_two_formats() -> None:
    group = KVCacheGroup(SPEC, 2)
    (caches,) = HybridKVCache({"all": group}, 4, "cpu").caches.values()
    stored = (PAGE_FORMATS["int8_per_token_head"], PAGE_FORMATS["nvfp4"])
    assert [cache.page_formats for cache in caches] == [stored] * 2


@pytest.mark.parametrize("kv_written", [True, False])
@pytest.mark.parametrize("pair", ["int8_per_token_head,int4_per_group", "mxfp4,float32"])
def test_calls_over_two_formats_are_recorded(pair: str, kv_written: bool, tmp_path: Path) -> None:
    keys, values = pair.split(",")
    case = Case(
        batch="mixed", kv_cache_dtype=keys, value_cache_dtype=values, layout="HND_INTERLEAVED"
    )
    torch_backend = attnlib.get_attn_backend(case.spec, "torch", "cpu")
    live = run_materialized_case(torch_backend, case.materialize(kv_written=kv_written)).out
    loaded = load_recording(
        save_recording(captured(case, kv_written=kv_written), tmp_path / "call.pt")
    )
    result = replay(loaded, "torch")
    assert result.passed and result.output is not None, str(result)
    assert torch.equal(result.output.out, live) and loaded.spec == case.spec


def test_triton_names_the_kernels_for_two_formats() -> None:
    """Prefills are portable; `explain` says so. A plain side is refused by name."""
    hopper = DeviceInfo(type="cuda", name="H100", capability=(9, 0), is_hypothetical=True)
    spec = SPEC.replace(
        dtype=torch.bfloat16, head_size=128, head_size_v=128, value_cache_dtype="int4_per_group"
    )
    assert not TritonBackend.validate_configuration(spec, hopper)
    prefill, decode, *_ = TritonBackend.explain_lines(spec, hopper)
    assert prefill.startswith("prefill: portable Triton kernel (keys and values in two formats")
    assert decode.startswith("decode:  Hopper kernel") and "int8_per_token_head,int4" in decode
    other = spec.replace(value_cache_dtype="mxfp4", kv_cache_dtype="auto")
    assert "mxfp4 not supported" in str(TritonBackend.validate_configuration(other, hopper)[0])
    reasons = TritonBackend.validate_configuration(spec.replace(kv_cache_dtype="auto"), hopper)
    assert [str(reason) for reason in reasons] == [
        "formats of keys and values=plain,int4_per_group not supported (supported: "
        "int8_per_token_head,int4_per_group, int8_per_token_head,nvfp4)"
    ]


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"kv_cache_dtype": "int4_per_group", "value_cache_dtype": None}, True),
        ({"kv_cache_dtype": "nvfp4", "value_cache_dtype": None}, True),
        (
            {
                "kv_cache_dtype": "nvfp4",
                "value_cache_dtype": None,
                "kv_rotation": "hadamard_values",
            },
            True,
        ),
        (
            {
                "kv_cache_dtype": "int4_per_group",
                "value_cache_dtype": None,
                "kv_rotation": "hadamard",
            },
            False,
        ),
        ({}, False),
    ],
)
def test_explain_warns_of_4_bit_keys(changes: dict[str, Any], warns: bool) -> None:
    spec = SPEC.replace(**changes)
    text = str(attnlib.explain(spec, "cpu", "torch"))
    assert ("warning: keys of 4 bits without a rotation" in text) is warns
    assert ("rotation: hadamard" in text) is (spec.kv_rotation is not None)
