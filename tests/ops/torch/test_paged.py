"""Paged decode and prefill compared with the float64 reference, for every parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.ops.calls import call_operation
from tests.ops.paged_case import LAYOUTS, make_case

HEADS, KV_HEADS = 6, 2
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, 0.015])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0, -math.inf, 4.0])
SCALES = torch.tensor([0.5, 1.75])

BATCHES = {
    "decode": ((1, 1, 1), (9, 14, 30)),
    "verify": ((3, 3, 3), (13, 9, 12)),
    "mixed": ((1, 7, 3), (40, 7, 5)),
    "empties": ((0, 2, 0, 3), (5, 2, 0, 0)),
    "more_queries_than_keys": ((5, 1, 4), (3, 9, 0)),
}
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window_of_four": {"window": (3, -1)},
    "window_left_0": {"window": (0, -1)},
    "window_left_0_bidirectional": {"window": (0, -1), "causal": False},
    "window_both_0": {"window": (0, 0), "causal": False},
    "window_right_0": {"window": (2, 0), "causal": False},
    "window_both_sides": {"window": (2, 3), "causal": False},
    "window_right_only": {"window": (-1, 1), "causal": False},
    "chunk": {"attention_chunk_size": 5},
    "chunk_window": {"attention_chunk_size": 8, "window": (2, -1)},
    "soft_cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi_bidirectional": {"alibi_slopes": SLOPES, "causal": False},
    "sinks": {"sinks": SINKS},
    "k_v_scales": {"k_scale": 0.5, "v_scale": torch.tensor(1.5)},
    "head_scales": {"k_scale": SCALES, "v_scale": SCALES.flip(0)},
    "everything": {
        "window": (3, -1),
        "logits_soft_cap": 2.0,
        "alibi_slopes": SLOPES,
        "sinks": SINKS,
        "k_scale": SCALES,
        "v_scale": SCALES.flip(0),
    },
    "everything_but_the_cap": {
        "window": (6, -1),
        "alibi_slopes": SLOPES,
        "sinks": SINKS,
        "k_scale": SCALES,
    },
}


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(operation: Any, batch: str, feature: str) -> None:
    """M1 to M5: output and LSE of every rule and batch, with NaN outside the sequences (P3, P5)."""
    case = make_case(
        *BATCHES[batch], num_heads=HEADS, num_kv_heads=KV_HEADS, extra_rows=2, **FEATURES[feature]
    )
    case.check(operation)
    case.check(operation, batch_invariant=True)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "feature", ["causal", "bidirectional", "soft_cap", "everything_but_the_cap"]
)
def test_query_bias(operation: Any, batch: str, feature: str) -> None:
    """M3: an explicit bias over the query span; -inf hides; columns past it are not read."""
    num_tokens = sum(BATCHES[batch][0]) + 1
    bias = torch.randn(num_tokens, 9, generator=torch.Generator().manual_seed(1))
    bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(2)) < 0.3] = -math.inf
    starts = 0
    for length in BATCHES[batch][0]:
        bias[starts : starts + length, length:] = math.nan
        starts += length
    case = make_case(
        *BATCHES[batch],
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        extra_rows=1,
        query_bias=bias,
        **FEATURES[feature],
    )
    case.check(operation)
    case.check(operation, batch_invariant=True)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_positive(operation: Any, scale: float) -> None:
    """M3: hidden keys stay hidden: -inf is not multiplied by the scale."""
    case = make_case((7, 1, 4), (7, 9, 12), scale=scale)
    case.check(operation)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_causal_per_request(operation: Any) -> None:
    """M1: `causal [R]` decides request by request."""
    case = make_case((3, 3, 3), (9, 7, 8), causal=torch.tensor([True, False, True]))
    case.check(operation)
    case.check(operation, batch_invariant=True)
    flipped = make_case((3, 3, 3), (9, 7, 8), causal=torch.tensor([False, True, False]))
    assert not torch.allclose(case.expected[0], flipped.expected[0])


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("contiguous_pages", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(operation: Any, layout: str, contiguous_pages: bool) -> None:
    """P1, P2: separate, head-major, interleaved, packed and aliased caches."""
    case = make_case((1, 2, 5), (9, 12, 17), layout=layout, contiguous_pages=contiguous_pages)
    case.check(operation)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 1), (7, 1), (8, 8), (24, 1), (12, 4)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_groups_and_block_sizes(operation: Any, heads: tuple[int, int], block_size: int) -> None:
    """GQA and MQA of any ratio, block sizes that are no power of two."""
    make_case(
        (1, 1, 4), (9, 20, 7), num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size
    ).check(operation)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("sizes", [(16, 8), (8, 24), (40, 40), (72, 16), (5, 3)])
def test_head_sizes(operation: Any, sizes: tuple[int, int]) -> None:
    """Head sizes that are no power of two, K and V of different size."""
    case = make_case((1, 1, 4), (9, 20, 7), head_size=sizes[0], head_size_v=sizes[1])
    case.check(operation)
    case.check(operation, batch_invariant=True)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 3e-3), (torch.bfloat16, 2.5e-2), (torch.float32, 2e-5)]
)
def test_dtypes(operation: Any, dtype: torch.dtype, tolerance: float) -> None:
    """M8: half inputs, statistics in float32: the LSE keeps float32 accuracy whatever the dtype."""
    for kwargs in ({}, {"sinks": SINKS[:4]}, {"logits_soft_cap": 3.0}):
        make_case((1, 1, 9), (40, 21, 30), dtype=dtype, **kwargs).check(operation, tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_float64(operation: Any) -> None:
    """float64 stays float64 all the way."""
    for kwargs in ({}, {"sinks": SINKS[:4], "alibi_slopes": SLOPES[:4]}, {"logits_soft_cap": 3.0}):
        case = make_case((1, 1, 9), (40, 21, 30), dtype=torch.float64, **kwargs)  # type: ignore[arg-type]
        case.check(operation, 1e-12)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    "scales", [(0.5, 2.0), (torch.tensor(0.25), torch.tensor(3.0)), (SCALES, SCALES.flip(0))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_cache(
    operation: Any, fp8: torch.dtype, scales: tuple[Any, Any], dtype: torch.dtype
) -> None:
    """M9: stored value * scale = real value, per tensor and per KV head."""
    case = make_case(
        (1, 1, 4), (9, 20, 7), cache_dtype=fp8, dtype=dtype, k_scale=scales[0], v_scale=scales[1]
    )
    case.check(operation, 2e-5 if dtype == torch.float32 else 2.5e-2)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_cache_of_another_float(operation: Any) -> None:
    """A bfloat16 cache under float32 queries is read exactly."""
    make_case((1, 1, 4), (9, 20, 7), cache_dtype=torch.bfloat16).check(operation)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("kwargs", [{}, {"window": (5, -1)}, {"logits_soft_cap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_elements_are_not_read(
    operation: Any, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    """P3, P5: NaN, Inf and invalid ids outside the sequence do not change a bit."""
    invalid = make_case((1, 1, 6), (9, 14, 30), dtype=dtype, **kwargs)
    clean = make_case((1, 1, 6), (9, 14, 30), dtype=dtype, **kwargs)
    for cache in clean.tensors[1:3]:
        cache.nan_to_num_(nan=0.0, posinf=0.0)
    clean.tensors[3].clamp_(0, clean.tensors[1].shape[0] - 1)
    for got, wanted in zip(invalid.run(operation), clean.run(operation), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [{"window": (5, -1)}, {"window": (5, -1), "logits_soft_cap": 2.0}, {"attention_chunk_size": 7}],
)
def test_positions_before_the_window_are_not_read(
    operation: Any, batch_invariant: bool, kwargs: dict[str, Any]
) -> None:
    """P5: positions that no row sees may be NaN, in the first visible block too."""
    case = make_case((1, 2), (9, 20), **kwargs)
    for request, first_seen in enumerate(
        (
            7 if "attention_chunk_size" in kwargs else 3,
            14 if "attention_chunk_size" in kwargs else 13,
        )
    ):
        for position in range(first_seen):
            block = int(case.tensors[3][request, position // 4])
            for cache in case.tensors[1:3]:
                cache[block, position % 4] = math.nan
    case.check(operation, batch_invariant=batch_invariant)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feature", ["causal", "sinks", "soft_cap", "k_v_scales", "window_of_four"])
def test_without_lse(operation: Any, feature: str, dtype: torch.dtype) -> None:
    """M5: requesting an LSE does not change a bit of the output."""
    case = make_case(
        (1, 70, 1),
        (9, 70, 1),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        dtype=dtype,
        **FEATURES[feature],
    )
    out = torch.full_like(case.query, math.nan)
    call_operation(operation, *case.tensors, **case.kwargs, out=out)
    assert torch.equal(out, case.run(operation)[0])


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_many_rows_with_biases_per_head(operation: Any) -> None:
    """More rows than are stacked per KV head: each query head has its own slope."""
    make_case((70,), (75,), num_heads=6, num_kv_heads=2, head_size=4, alibi_slopes=SLOPES).check(
        operation
    )


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("fused", [True, False])
def test_tail_rows(operation: Any, fused: bool) -> None:
    """M6: rows past the batch are exactly 0 and -inf, even where the buffers held NaN."""
    case = make_case((1, 3), (9, 3), extra_rows=3, logits_soft_cap=0.0 if fused else 2.0)
    out, lse = case.run(operation)
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))
    assert torch.equal(lse[4:], torch.full_like(lse[4:], -math.inf))


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_empty_batches(operation: Any) -> None:
    """M7: no requests, no tokens, nothing but padding rows."""
    make_case((), ()).check(operation)
    make_case((), (), extra_rows=2).check(operation)
    make_case((0, 0), (0, 7)).check(operation)
    make_case((2, 0), (0, 0), sinks=torch.tensor([0.5, 1.0, -2.0, 0.0])).check(operation)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_strided_query_and_output(operation: Any) -> None:
    """P9: a query inside a fused QKV, an output inside a wider buffer."""
    case = make_case((1, 1, 4), (9, 20, 7), extra_rows=1)
    fused = torch.randn(case.query.shape[0], 8, 16)
    fused[:, 2:6] = case.query
    strided = type(case)((fused[:, 2:6], *case.tensors[1:]), case.kwargs)
    wide = torch.full((7, 9, 20), 7.0)
    out, lse = wide[:, 3:7, 2:18], torch.empty(4, 7).t()
    call_operation(operation, *strided.tensors, **strided.kwargs, out=out, lse=lse)
    torch.testing.assert_close(out.double(), case.expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), case.expected[1], atol=2e-5, rtol=2e-5)
    out.fill_(7.0)
    assert torch.equal(wide, torch.full_like(wide, 7.0))


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("contiguous_pages", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_elements_that_are_not_adjacent(
    operation: Any, contiguous_pages: bool, position: int
) -> None:
    """The fused operator of torch would read other memory."""
    case = make_case((1, 1, 4), (9, 20, 7), contiguous_pages=contiguous_pages)
    tensors = list(case.tensors)
    tensors[position] = torch.stack([tensors[position]] * 2, dim=-1)[..., 0]
    type(case)(tuple(tensors), case.kwargs).check(operation)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
@pytest.mark.parametrize("kwargs", [{}, {"logits_soft_cap": 2.0}, {"sinks": SINKS[:4]}])
def test_same_call_same_bits(operation: Any, kwargs: dict[str, Any]) -> None:
    """M8: the same call twice gives the same bits."""
    case = make_case((1, 1, 1, 40), (90, 61, 7, 77), dtype=torch.bfloat16, **kwargs)
    first, second = case.run(operation), case.run(operation)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_host_copies_are_enough(operation: Any) -> None:
    """Lengths on the host are used instead of those on the device."""
    case = make_case((1, 1, 4), (9, 20, 7))
    query, keys, values, table, starts, lengths = case.tensors
    out = torch.empty_like(query)
    call_operation(
        operation, query, keys, values, table, torch.zeros_like(starts), torch.zeros_like(lengths),
        **case.kwargs, out=out, query_start_loc_cpu=starts, seq_lens_cpu=lengths,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), case.expected[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_no_graph_is_recorded(operation: Any) -> None:
    """A query that requires grad records no graph."""
    case = make_case((1, 4), (9, 7))
    out = torch.empty_like(case.query)
    call_operation(
        operation, case.query.requires_grad_(), *case.tensors[1:], **case.kwargs, out=out
    )
    assert not out.requires_grad
