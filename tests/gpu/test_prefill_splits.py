"""Hopper prefills whose keys are divided over work tiles, in each form of the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnlib.ops.triton.hopper import select_prefills
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.gpu.devices import needs_gpu
from tests.ops.triton.features import feature_options
from tests.ops.triton.paged_inputs import make_batch

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="the kernels of Hopper",
    ),
]
CUDA = torch.device("cuda")
SIZES = {
    "plain": (64, 80, 128, 192, 256, 512),
    "bidirectional": (64, 192, 256, 512),
    "window": (80, 192, 256, 512),
    "window_both": (128, 192, 256, 512),
    "chunk": (64, 192, 256, 512),
    "cap": (80, 192, 256, 512),
    "sinks": (128, 192, 256, 512),
}
"""Head sizes by feature. Each pair is a kernel; heads of up to 128 have one form of it, and the
others one each."""
CASES = [
    (splits, length, size, feature)
    for start, (feature, sizes) in enumerate(SIZES.items())
    for number, size in enumerate(sizes, start)
    for splits, length in (((2, 1900), (5, 14000)), ((5, 1900), (2, 14000)))[number % 2]
]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[int]:
    """Every Hopper prefill has this many splits."""
    monkeypatch.setattr(select_prefills, "key_splits", lambda *_: request.param)
    LAUNCHES.clear()
    yield request.param
    LAUNCHES.clear()


@pytest.mark.parametrize(("splits", "length", "size", "feature"), CASES, indirect=["splits"])
def test_divided_prefills(splits: int, length: int, size: int, feature: str) -> None:
    """M1 to M6, P5: short requests have fewer tiles than splits."""
    batch = make_batch(
        CUDA,
        [65, 1, 35, 0, 2],
        [length, 300, 35, 40, 0],
        padding=3,
        heads=8,
        kv_heads=2,
        d=size,
        dtype=torch.bfloat16,
        block_size=16,
    )
    given = feature_options(
        feature, requests=5, tokens=batch.query.shape[0], heads=8, max_query_len=65, device=CUDA
    )
    expected = batch.expected(**given)
    for _ in range(2):  # by Triton, then directly
        batch.check(paged_prefill, expected, **given)
    found = [one for one in LAUNCHES.values() if isinstance(one, HopperPrefill)]
    assert [one.partials is not None and one.partials.num_splits for one in found] == [splits]
