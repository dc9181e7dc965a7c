"""Cache writes: the given slots and no other byte (P4), saturated if quantized (M9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.torch import cache_write
from attnlib.ops.torch.cache_write import write_kv
from tests.ops.paged_case import LAYOUTS, _caches

SLOTS = torch.tensor([9, -1, 3, 14, -7, 0])


def as_bytes(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


def with_sync(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, **scales: Any
) -> None:
    write_kv(key, value, key_cache, value_cache, slots, **scales)


def without_sync(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> None:
    """The implementation for devices, run on the CPU."""
    cache_write._write_valid(key, slots, key_cache, k_scale, None)
    cache_write._write_valid(value, slots, value_cache, v_scale, None)


WAYS = pytest.mark.parametrize("write", [with_sync, without_sync])


@WAYS
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "alias"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize(
    "slots", [SLOTS, SLOTS.abs(), torch.full((6,), -1)], ids=["some", "all", "none"]
)
def test_slots_and_nothing_else(write: Any, layout: str, dtype: torch.dtype, slots: Tensor) -> None:
    """P1, P4: one write per slot in any layout; all other slots keep their bits."""
    key_cache, value_cache = _caches((5, 4, 2), 8, 8, dtype, layout)
    key, value = torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    wanted_key, wanted_value = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted_key[slot // 4, slot % 4] = key[token].to(dtype)
            wanted_value[slot // 4, slot % 4] = value[token].to(dtype)
    write(key, value, key_cache, value_cache, slots)
    assert torch.equal(as_bytes(key_cache), as_bytes(wanted_key))
    assert torch.equal(as_bytes(value_cache), as_bytes(wanted_value))


@WAYS
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    "scale", [0.5, torch.tensor(0.5), torch.tensor([0.5, 4.0])], ids=["float", "0-d", "per_head"]
)
def test_quantised_writes_saturate(write: Any, fp8: torch.dtype, scale: Any) -> None:
    """M9: value / scale, held at the largest finite value; Inf saturates, NaN may stay."""
    limit = torch.finfo(fp8).max
    cache = torch.zeros(2, 4, 2, 4, dtype=fp8)
    key = torch.tensor([1.0, -1e30, float("inf"), 3.0]).expand(1, 2, 4)
    write(key, key, cache, cache.clone(), torch.tensor([5]), k_scale=scale, v_scale=scale)
    factors = torch.as_tensor(scale).expand(2)
    for head in range(2):
        expected = [
            1.0 / float(factors[head]),
            -limit,
            limit,
            float(torch.tensor(3.0 / float(factors[head])).to(fp8)),
        ]
        assert cache[1, 1, head].float().tolist() == expected
    write(
        torch.full((1, 2, 4), float("nan")),
        key,
        cache,
        cache.clone(),
        torch.tensor([0]),
        k_scale=scale,
    )
    assert not torch.isinf(cache[0, 0].float()).any()


def test_slot_mapping_says_how_many() -> None:
    """P4: its length counts, not the key's; too few keys are refused before anything is written."""
    cache = torch.zeros(2, 4, 1, 4)
    write_kv(
        torch.ones(5, 1, 4),
        torch.ones(5, 1, 4),
        cache,
        torch.zeros(2, 4, 1, 4),
        torch.tensor([2, 3]),
    )
    assert cache.sum() == 8
    with pytest.raises(ContractError, match=r"value has 1 tokens, but slot_mapping has 2.*\[P4\]"):
        write_kv(
            torch.full((2, 1, 4), 7.0), torch.ones(1, 1, 4), cache, cache, torch.tensor([0, 1])
        )
    assert cache.max() == 1


def test_empty_writes() -> None:
    """M7: no tokens, or a cache without blocks."""
    cache = torch.zeros(2, 4, 1, 4)
    write_kv(
        torch.ones(3, 1, 4), torch.ones(3, 1, 4), cache, cache, torch.empty(0, dtype=torch.int64)
    )
    write_kv(torch.ones(3, 1, 4), torch.ones(3, 1, 4), cache[:0], cache[:0], torch.full((3,), -1))
    assert cache.sum() == 0


def test_strided_keys_and_no_grad() -> None:
    """P9: keys inside a fused QKV; the cache never joins a graph."""
    fused = torch.randn(3, 6, 4, requires_grad=True)
    key_cache, value_cache = torch.zeros(2, 4, 2, 4), torch.zeros(2, 4, 2, 4)
    write_kv(fused[:, 2:4], fused[:, 4:], key_cache, value_cache, torch.tensor([1, 4, 6]))
    assert torch.equal(key_cache[1, 2], fused[2, 2:4]) and torch.equal(
        value_cache[0, 1], fused[0, 4:]
    )
    assert not key_cache.requires_grad


def test_no_host_sync() -> None:
    """On a device, nothing synchronizes: meta tensors would raise."""
    with torch.device("meta"):
        cache = torch.empty(4, 4, 2, 8, dtype=torch.float8_e4m3fn)
        rows = torch.empty(5, 2, 8)
        write_kv(
            rows,
            rows,
            cache,
            cache,
            torch.empty(5, dtype=torch.int64),
            k_scale=torch.empty(2),
            v_scale=torch.empty(()),
        )


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (torch.zeros(2, dtype=torch.int32), "slot_mapping has dtype torch.int32"),
        (torch.zeros(2), "slot_mapping has dtype torch.float32"),
        (torch.zeros(2, 1, dtype=torch.int64), r"slot_mapping has shape \(2, 1\)"),
    ],
)
def test_slots_of_another_type_are_refused(slots: Tensor, words: str) -> None:
    """P4: int64 `[T]`, as the Triton counterpart requires it."""
    cache = torch.zeros(2, 4, 1, 4)
    with pytest.raises(ContractError, match=words):
        write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), cache, cache.clone(), slots)
    assert cache.sum() == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_scales_are_refused(scale: float) -> None:
    """M9: finite and above 0."""
    cache = torch.zeros(2, 4, 1, 4, dtype=torch.float8_e4m3fn)
    rows, slots = torch.ones(2, 1, 4), torch.tensor([0, 1])
    with pytest.raises(ContractError, match=r"v_scale=.* must be finite and above 0.*\[M9\]"):
        write_kv(rows, rows, cache, cache.clone(), slots, v_scale=scale)
    assert not cache.float().any()
