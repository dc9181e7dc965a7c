"""Random combinations of features, shapes and layouts."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.ops.triton.features import FEATURES, feature_options
from tests.ops.triton.paged_inputs import LAYOUTS, PagedBatch, make_batch

DTYPES = [torch.float32, torch.float16]
CACHE_DTYPES = [None, None, torch.float8_e4m3fn, torch.float8_e5m2]


def _draw(seed: int, device: torch.device) -> tuple[PagedBatch, dict[str, Any], int | None]:
    """Return a batch of up to five requests, one to three features, and a number of splits."""
    choose = random.Random(seed)
    query_lens = [
        choose.choice([0, 1, 1, 2, 8, choose.randint(1, 30)]) for _ in range(choose.randint(1, 5))
    ]
    seq_lens = [
        max(0, length + choose.choice([-3, 0, choose.randint(0, 60)])) for length in query_lens
    ]
    kv_heads, group = choose.choice([1, 2]), choose.choice([1, 2, 3, 5])
    cache_dtype = choose.choice(CACHE_DTYPES)
    batch = make_batch(
        device,
        query_lens,
        seq_lens,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        d=choose.choice([16, 24, 40, 64]),
        dv=choose.choice([0, 0, 16, 80]),
        block_size=choose.choice([8, 16, 24, 64]),
        dtype=choose.choice(DTYPES),
        cache_dtype=cache_dtype,
        layout=choose.choice(LAYOUTS),
        padding=choose.choice([0, 1, 40]),
        seed=seed,
    )
    options: dict[str, Any] = {}
    for feature in choose.sample(FEATURES, choose.randint(1, 3)):
        options |= feature_options(
            feature,
            requests=len(seq_lens),
            tokens=batch.query.shape[0],
            heads=kv_heads * group,
            max_query_len=max([*query_lens, 1]),
            device=device,
        )
    if cache_dtype is not None:
        options |= {"k_scale": 0.5, "v_scale": torch.linspace(0.5, 1.5, kv_heads, device=device)}
    return batch, options, choose.choice([None, None, 1, 2, 5])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_batches(device: torch.device, seed: int) -> None:
    """Prefill and decode agree with the reference."""
    batch, options, num_splits = _draw(seed, device)
    expected = batch.expected(**options)
    batch.check(paged_prefill, expected, **options)
    batch.check(partial(paged_decode, num_splits=num_splits), expected, **options)
