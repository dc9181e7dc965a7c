"""Writing keys and values to their slots."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.triton.cache_write import write_kv
from tests.ops.triton.paged_inputs import DTYPES, LAYOUTS, make_cache

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_only_the_slots(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    """P1, P2, P4, K3: slot -1 writes nothing, and no other element changes."""
    key_cache, value_cache = make_cache(layout, 5, 8, 3, 24, 16, dtype, device)
    key, value = (
        torch.randn(6, 3, 24, device=device).to(dtype),
        torch.randn(6, 3, 16, device=device).to(dtype),
    )
    want_key, want_value = key_cache.clone(), value_cache.clone()
    slots = torch.tensor([39, -1, 0, 17, -5], dtype=torch.int64, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want_key[slot // 8, slot % 8], want_value[slot // 8, slot % 8] = (
                key[token],
                value[token],
            )
    write_kv(key, value, key_cache, value_cache, slots)
    assert torch.equal(_bits(key_cache), _bits(want_key))
    assert torch.equal(_bits(value_cache), _bits(want_value))


@pytest.mark.parametrize("cache_dtype", FP8, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
def test_float8_is_divided_and_saturated(
    device: torch.device, cache_dtype: torch.dtype, per_head: bool
) -> None:
    """M9, Q3: stored = value / scale, rounded to nearest and saturated."""
    largest = torch.finfo(cache_dtype).max
    key_cache, value_cache = make_cache("nhd", 2, 16, 3, 16, 16, cache_dtype, device)
    key, value = torch.randn(4, 3, 16, device=device), torch.randn(4, 3, 16, device=device) * 1e4
    key[0, 0, 0], key[1, 1, 1] = float("inf"), -1e6
    k_scale = torch.tensor([0.25, 2.0, 0.3], device=device) if per_head else 0.25
    v_scale = (
        torch.tensor([1.0, 0.5, 0.7], device=device)
        if per_head
        else torch.tensor(0.5, device=device)
    )
    write_kv(
        key,
        value,
        key_cache,
        value_cache,
        torch.tensor([3, 4, 31, 0], device=device),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    for x, scale, cache in ((key, k_scale, key_cache), (value, v_scale, value_cache)):
        divisor = scale[:, None] if per_head else scale
        want = (x / divisor).clamp(-largest, largest).to(cache_dtype)
        got = cache.reshape(32, 3, 16)[torch.tensor([3, 4, 31, 0], device=device)]
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_strided_keys_and_more_keys_than_slots(device: torch.device) -> None:
    """P4, P9: views of a fused projection; the slot mapping determines the count."""
    fused = torch.randn(5, 2, 3, 16, device=device)
    key_cache, value_cache = make_cache("nhd", 2, 8, 3, 16, 16, torch.float32, device)
    slots = torch.tensor([9, 2], dtype=torch.int64, device=device)
    write_kv(fused[:, 0], fused[:, 1], key_cache, value_cache, slots)
    assert torch.equal(key_cache[1, 1], fused[0, 0]) and torch.equal(value_cache[0, 2], fused[1, 1])
    assert int(key_cache.isnan().logical_not().sum()) == 2 * 3 * 16


def test_one_head_with_an_arbitrary_stride(device: torch.device) -> None:
    """P1: a dimension of size 1 may have any stride."""
    base = torch.full((2, 8, 1, 16), float("nan"), device=device)
    cache = base.as_strided((2, 8, 1, 16), (128, 16, 12345, 1))
    key = torch.randn(1, 1, 16, device=device)
    write_kv(key, key, cache, cache, torch.tensor([10], device=device))
    assert torch.equal(base[1, 2, 0], key[0, 0])


def test_empty_step_writes_nothing(device: torch.device) -> None:
    """M7: without tokens."""
    key_cache, value_cache = make_cache("nhd", 2, 8, 3, 16, 16, torch.float32, device)
    empty = torch.empty(0, 3, 16, device=device)
    write_kv(empty, empty, key_cache, value_cache, torch.empty(0, dtype=torch.int64, device=device))
    assert key_cache.isnan().all()


def test_invalid_slots_are_rejected(device: torch.device) -> None:
    """K3: another dtype, or more slots than keys, before anything is written."""
    key_cache, value_cache = make_cache("nhd", 2, 8, 3, 16, 16, torch.float32, device)
    key = torch.randn(2, 3, 16, device=device)
    with pytest.raises(
        ContractError, match=r"slot_mapping has dtype torch.int32; convert it to torch.int64"
    ):
        write_kv(key, key, key_cache, value_cache, torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ContractError, match=r"key has 2 tokens, but slot_mapping has 3"):
        write_kv(key, key, key_cache, value_cache, torch.zeros(3, dtype=torch.int64, device=device))
    assert key_cache.isnan().all() and value_cache.isnan().all()


@pytest.mark.gpu
def test_pool_beyond_2_to_the_31_elements(device: torch.device) -> None:
    """P6: the last slot of a pool of 2^31 + elements is written and no other."""
    blocks = (1 << 31) // (16 * 128) + 8
    cache = torch.zeros(blocks, 16, 1, 128, dtype=torch.float16, device=device)
    key = torch.ones(1, 1, 128, dtype=torch.float16, device=device)
    write_kv(key, key, cache, cache, torch.tensor([blocks * 16 - 1], device=device))
    assert bool((cache[-1, -1] == 1).all()) and int(cache.count_nonzero()) == 128


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_scales_are_rejected(device: torch.device, scale: float) -> None:
    """M9: finite and above 0."""
    key_cache, value_cache = make_cache("nhd", 2, 8, 3, 16, 16, torch.float8_e4m3fn, device)
    key, slots = torch.randn(2, 3, 16, device=device), torch.arange(2, device=device)
    with pytest.raises(ContractError, match=r"k_scale=.* must be finite and above 0.*\[M9\]"):
        write_kv(key, key, key_cache, value_cache, slots, k_scale=scale)
    assert key_cache.float().isnan().all()
