"""M9: bfloat16 queries of any magnitude over caches that portable kernels multiply in float16."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import attnlib
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill as reference_attention
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill
from attnlib.ops.triton.selected_attention import selected_attention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from tests.ops.triton.paged_inputs import assert_close, make_batch

MAGNITUDES = [(1e5, 1.0), (1.0, 1e7), (1e-8, 1.0)]
"""Magnitudes of the first query head, whose scores are near 1, and of the others."""


def _select_all(*tensors: torch.Tensor, **options: Any) -> None:
    """`selected_attention` with lists of all blocks."""
    params, tokens = tensors[-1], tensors[0].shape[0]
    lists = torch.arange(2, dtype=torch.int32, device=tensors[0].device).repeat(tokens, 1, 1)
    del options["max_query_len"], options["max_seq_len"]
    selected_attention(
        *tensors[:-1], params, KeySelection(block_size=16, max_blocks=2), SelectedKeys(lists),
        **options,
    )  # fmt: skip


OPERATIONS: dict[str, Any] = {
    "prefill": partial(paged_prefill, kernels="portable"),
    "decode": partial(paged_decode, kernels="portable"),
    "invariant": partial(paged_decode, batch_invariant=True, kernels="portable"),
    "selected": _select_all,
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("magnitudes", MAGNITUDES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_float8_caches(
    device: torch.device, operation: str, magnitudes: tuple[float, float]
) -> None:
    """Each row has a range of its own, and factors of the scores also apply before a soft cap."""
    batch = make_batch(
        device, [3, 1], [21, 9], d=24, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn
    )
    batch.query[:, 0] *= magnitudes[0]
    batch.query[:, 1:] *= magnitudes[1]
    scale = 0.2 / magnitudes[0]
    for options in ({}, {"logits_soft_cap": 2.0}):
        batch.check(OPERATIONS[operation], scale=scale, k_scale=0.5, v_scale=0.5, **options)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_negative_scale_keeps_its_sign(device: torch.device, operation: str) -> None:
    """M3: over a float8 cache, where the scale becomes one for each row."""
    batch = make_batch(
        device, [3, 1], [21, 9], d=24, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn
    )
    for options in ({}, {"logits_soft_cap": 2.0}):
        batch.check(OPERATIONS[operation], scale=-0.4, k_scale=0.5, v_scale=0.5, **options)


@pytest.mark.parametrize(
    ("name", "magnitude"),
    [
        ("int8_per_token_head", 1.0),
        ("int4_per_group", 1.0),
        pytest.param("nvfp4", 1e3, marks=pytest.mark.gpu),
        pytest.param("mxfp4", 1e6, marks=pytest.mark.gpu),
    ],
)
def test_pages(device: torch.device, name: str, magnitude: float) -> None:
    """M16: large queries, and large keys and values (mxfp4 is multiplied in bfloat16)."""
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, kv_cache_dtype=name,
        block_size=16,
    )  # fmt: skip
    cache = attnlib.PagedKVCache.allocate(spec, 3, device)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(count, heads, 32).to(device, torch.bfloat16)
        for count, heads in ((4, 4), (41, 2), (41, 2))
    )
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    slots = torch.arange(41, device=device)
    write_kv(
        key * magnitude, value * magnitude, cache.key_cache, cache.value_cache, slots, **scales
    )
    params = AttentionParams(scale=1e-6 / magnitude, **scales)
    batch = (
        torch.arange(3, dtype=torch.int32, device=device).view(1, 3),
        torch.tensor([0, 4], dtype=torch.int32, device=device),
        torch.tensor([41], dtype=torch.int32, device=device),
    )
    query[:, 0] *= 1e6
    query[:, 1:] *= 1e5
    results = []
    for attend, rows in ((paged_decode, query), (reference_attention, query.float())):
        out, lse = torch.empty_like(rows), torch.empty(4, 4, device=device)
        chosen: dict[str, Any] = {"kernels": "portable"} if attend is paged_decode else {}
        attend(
            rows, cache.key_cache, cache.value_cache, *batch, params, max_query_len=4,
            max_seq_len=41, out=out, lse=lse, **chosen,
        )  # fmt: skip
        results.append((out.float() / magnitude, lse))
    assert_close(results[0][0], results[1][0], torch.bfloat16)
    assert_close(results[0][1], results[1][1], torch.float16, "lse")
