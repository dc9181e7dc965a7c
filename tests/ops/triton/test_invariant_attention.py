"""M15: the batch-invariant operations of `ops.triton`: results, and equal bits in other batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.invariant_tiles import (
    choose_invariant_tile,
    count_segments,
    invariant_workspace_bytes,
    segment_keys,
)
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.ops.triton.features import FEATURES, feature_options
from tests.ops.triton.paged_inputs import PagedBatch, make_batch

DECODE = partial(paged_decode, batch_invariant=True)
PREFILL = partial(paged_prefill, batch_invariant=True)
QUERIES, LENGTHS = [1, 5, 1, 2], [150, 70, 3, 129]
"""Requests of one to three segments of 64 keys, which is the size on a CPU."""
_FAST = {"window", "all"}
KB = 1024
HOPPER = DeviceLimits(132, 227 * KB, 228 * KB, (9, 0), True)


def _batch(device: torch.device, **options: Any) -> PagedBatch:
    return make_batch(device, QUERIES, LENGTHS, seed=5, **options)


def _rows(batch: PagedBatch, request: int, first: int, end: int) -> PagedBatch:
    """Tokens [first, end) of one request, as a batch of its own."""
    begin = int(batch.query_start_loc[request])
    left = int(batch.query_start_loc[request + 1]) - begin - end
    starts = torch.tensor([0, end - first], dtype=torch.int32, device=batch.query.device)
    options = dict(batch.options)
    if (bias := options.get("query_bias")) is not None:
        options["query_bias"] = bias[begin + first : begin + end]
    if isinstance(causal := options.get("causal"), torch.Tensor):
        options["causal"] = causal[request : request + 1]
    return PagedBatch(
        batch.query[begin + first : begin + end], batch.key_cache, batch.value_cache,
        batch.block_table[request : request + 1].contiguous(), starts,
        batch.seq_lens[request : request + 1] - left, end - first, options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "feature",
    [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES],
)
def test_results_and_bits(device: torch.device, feature: str) -> None:
    """Both operations compute the reference, with equal bits: together, alone and in chunks."""
    options = feature_options(
        feature, requests=4, tokens=sum(QUERIES), heads=4, max_query_len=5, device=device
    )
    batch = _batch(device, **options)
    batch.check(DECODE)
    out, lse = batch.run(DECODE)
    assert all(torch.equal(a, b) for a, b in zip(batch.run(PREFILL), (out, lse), strict=True))
    # A bias and a mask by the length of the sequence belong to the whole query span.
    spans = [(0, 2), (2, 3), (3, 5)] if options.get("causal") is True else [(0, 5)]
    spans = spans if "query_bias" not in options else [(0, 5)]
    for operation in (DECODE, PREFILL):
        for first, end in spans:
            rows = slice(1 + first, 1 + end)
            part = _rows(batch, 1, first, end).run(operation)
            assert torch.equal(part[0], out[rows]) and torch.equal(part[1], lse[rows])
        alone = _rows(batch, 0, 0, 1).run(operation)
        assert torch.equal(alone[0], out[:1]) and torch.equal(alone[1], lse[:1])


@pytest.mark.parametrize(
    "options",
    [
        {"cache_dtype": torch.float8_e4m3fn, "k_scale": 0.5, "v_scale": 2.0},
        {"dtype": torch.float16, "d": 24, "dv": 40},
        pytest.param({"heads": 20, "kv_heads": 1}, marks=pytest.mark.slow),
        {"layout": "packed", "block_size": 8},
    ],
    ids=["float8", "head sizes", "one KV head", "packed"],
)
def test_formats(device: torch.device, options: dict[str, Any]) -> None:
    batch = _batch(device, padding=3, **options)
    batch.check(DECODE)
    for ours, theirs in zip(batch.run(PREFILL), batch.run(DECODE), strict=True):
        assert torch.equal(ours, theirs)


def test_longer_limits_leave_the_bits(device: torch.device) -> None:
    """A captured graph has other bounds on lengths, so more programs, than an eager batch."""
    batch = _batch(device)
    out, lse = batch.run(DECODE)
    for bound in (150, 1000, 5000):
        again = batch.run(DECODE, max_seq_len=bound)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_the_workspace_is_checked(device: torch.device) -> None:
    batch = _batch(device)
    segments = count_segments(150, False, _limits(device))
    need = invariant_workspace_bytes(sum(QUERIES), 4, 32, segments)
    assert need == 4 * (9 * 4 * segments * 34 + 9) or segments == 1
    if segments == 1:
        return
    guard = torch.full((need // 4 + 1,), float("nan"), device=device)
    batch.check(partial(DECODE, workspace=guard[:-1]))
    assert guard[-1].isnan() and not guard[:-1].isnan().all()
    with pytest.raises(ContractError, match="workspace holds"):
        batch.run(DECODE, workspace=guard[: need // 4 - 1])


def _limits(device: torch.device) -> DeviceLimits:
    from attnlib.ops.triton.heuristics.device import device_limits

    return device_limits(device)


def test_tiles_and_segments() -> None:
    """Tiles follow from the layer and the chip; every tile divides a segment."""
    sizes = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512), (80, 40)]
    for head_sizes in sizes:
        for dtype in (torch.bfloat16, torch.float32):
            tile = choose_invariant_tile(LayerShape(8, 2, *head_sizes, dtype, dtype), HOPPER)
            assert segment_keys(HOPPER) % tile.block_n == 0
    with pytest.raises(UnsupportedConfigError, match="batch_invariant=True with head sizes"):
        large = LayerShape(8, 2, 4096, 4096, torch.float32, torch.float32)
        choose_invariant_tile(large, HOPPER)
    size = segment_keys(HOPPER)
    assert [count_segments(n, False, HOPPER) for n in (0, 1, size, size + 1)] == [1, 1, 1, 2]
    assert [count_segments(n, True, HOPPER) for n in (1, 2, size)] == [1, 2, 2]
