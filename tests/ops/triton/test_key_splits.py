"""Prefills whose keys are divided over programs: results, and how many programs share a tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnlib.ops.triton import paged_prefill as module
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.splits import prefill_splits
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.ops.triton.features import FEATURES, feature_options
from tests.ops.triton.paged_inputs import make_batch

SMS = 132


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[int]:
    """Every prefill over pages has this many splits; at least one was launched."""
    monkeypatch.setattr(module, "key_splits", lambda *_: request.param)
    LAUNCHES.clear()
    yield request.param
    assert any(getattr(found, "combine", None) is not None for found in LAUNCHES.values())
    LAUNCHES.clear()


def _check(device: torch.device, feature: str, **options: Any) -> None:
    """A chunk, a decode, a prompt with fewer key tiles than splits, requests without keys or
    queries, and padding rows."""
    batch = make_batch(
        device, [5, 1, 35, 0, 2], [600, 300, 35, 40, 0], padding=3, heads=4, kv_heads=2, d=16,
        **options,
    )  # fmt: skip
    given = feature_options(
        feature, requests=5, tokens=batch.query.shape[0], heads=4,
        max_query_len=batch.options["max_query_len"], device=device,
    )  # fmt: skip
    batch.check(paged_prefill, batch.expected(**given), **given)


@pytest.mark.parametrize("splits", [3], indirect=True)
@pytest.mark.parametrize("feature", ["sinks", "window_both", "all"])
def test_divided_keys(device: torch.device, splits: int, feature: str) -> None:
    """M1 to M6, P5: masks are those of undivided keys, and a sink counts once."""
    _check(device, feature)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 7], indirect=True)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_with_divided_keys(device: torch.device, splits: int, feature: str) -> None:
    _check(device, feature)


@pytest.mark.parametrize("splits", [3], indirect=True)
@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
def test_float8_caches(device: torch.device, splits: int, per_head: bool) -> None:
    """M9: the scale of the values is that of each split."""
    batch = make_batch(
        device, [13, 1], [300, 9], dtype=torch.float16, cache_dtype=torch.float8_e4m3fn
    )
    scales = torch.tensor([0.25, 0.8], device=device) if per_head else 0.25
    batch.check(paged_prefill, k_scale=scales, v_scale=scales)


@pytest.mark.parametrize("splits", [4], indirect=True)
def test_combined_without_lse(device: torch.device, splits: int) -> None:
    """The LSEs of splits are kept in the workspace, whether or not the call has LSEs."""
    batch = make_batch(device, [9], [400], heads=2, kv_heads=1, d=16)
    out, _ = batch.run(paged_prefill)
    without, _ = batch.run(paged_prefill, lse=None)
    assert torch.equal(out, without)


@pytest.mark.parametrize(
    ("programs", "keys", "expected"),
    [
        (64, 100_000, 2),  # 256 tokens, 32 / 8 heads, tiles of 32 tokens
        (64, 30_000, 2),  # 4 requests of 64 tokens
        (32, 8192, 4),  # 4 requests of 32 tokens
        (64, 4096, 1),  # 8 requests of 32 tokens
        (64, 16384, 2),  # 2 requests of 128 tokens
        (32, 4096, 4),  # 128 tokens
        (16, 8192, 8),  # 64 tokens
        (128, 60_000, 1),  # 512 tokens
        (8, 100_000, 16),
        (1, 1 << 20, 32),
        (8, 2048, 1),
        (8, 0, 1),
    ],
)
def test_few_tiles_over_long_keys_are_divided(programs: int, keys: int, expected: int) -> None:
    assert prefill_splits(programs, keys, keys, SMS) == expected


def test_windows_limit_splits() -> None:
    assert prefill_splits(4, 1 << 17, 4200, SMS) == 8
    assert prefill_splits(4, 1 << 17, 2047, SMS) == 1


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float16, 16), (torch.float16, 1), (torch.float8_e4m3fn, 16)]
)
def test_splits_are_equal_in_a_class_of_lengths(dtype: torch.dtype, block_size: int) -> None:
    """Launches are shared by all bounds of a class, so they do not depend on earlier batches."""
    cache, starts = torch.empty(2, block_size, 1, 16, dtype=dtype), torch.zeros(3).int()
    found: dict[int, set[int]] = {}
    for bound in range(1, 140_000, 7):
        batch = BatchTensors(starts, starts[:2], None, max_seq_len=bound)
        splits = prefill_splits(4, bound, bound, SMS)
        found.setdefault(batch.length_class(cache), set()).add(splits)
    assert all(len(splits) == 1 for splits in found.values())
    assert {splits for (splits,) in found.values()} == {1, 4, 8, 16, 32}
    assert len(found) < 50
