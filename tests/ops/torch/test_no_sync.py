"""With lengths on the host, no operation synchronizes: meta tensors would raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.paged_prefill import paged_prefill
from attnlib.ops.torch.scores import attention_scores
from attnlib.ops.torch.varlen_prefill import varlen_prefill
from tests.ops.calls import call_operation

STARTS, LENGTHS = torch.tensor([0, 1, 5, 5]), torch.tensor([40, 9, 0])
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window_and_cap": {"window": (3, -1), "logits_soft_cap": 2.0},
    "per_request": {"causal": torch.empty(3, dtype=torch.bool, device="meta")},
    "sinks_alibi_bias_scales": {
        "sinks": torch.empty(4, device="meta"), "alibi_slopes": torch.empty(4, device="meta"),
        "query_bias": torch.empty(6, 4, device="meta"),
    },
}  # fmt: skip


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("operation", [paged_prefill, paged_decode])
def test_paged(operation: Any, feature: str, batch_invariant: bool) -> None:
    """A device-side scale, table and causal flag are read by the device only."""
    cache = rows(12, 16, 2, 8, dtype=torch.bfloat16)
    table = rows(3, 4, dtype=torch.int32)
    call_operation(
        operation,
        rows(6, 4, 8), cache, cache, table, rows(4, dtype=torch.int32), rows(3, dtype=torch.int32),
        max_query_len=4, max_seq_len=40, scale=1.0, k_scale=rows(2), v_scale=rows(1)[0], out=rows(6,
        4, 8), lse=rows(6, 4), query_start_loc_cpu=STARTS, seq_lens_cpu=LENGTHS,
        batch_invariant=batch_invariant, **FEATURES[feature],
    )  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_unpaged_and_scores(feature: str) -> None:
    """The same for unpaged attention and for the weights."""
    ends = torch.tensor([0, 40, 49, 49])
    call_operation(
        varlen_prefill, rows(6, 4, 8), rows(49, 2, 8), rows(49, 2, 8), rows(4), rows(4),
        max_seqlen_q=4, max_seqlen_k=40, scale=1.0, out=rows(6, 4, 8), lse=rows(6, 4),
        cu_seqlens_q_cpu=STARTS, cu_seqlens_k_cpu=ends, **FEATURES[feature],
    )  # fmt: skip
    weights = call_operation(
        attention_scores, rows(6, 4, 8), rows(12, 16, 2, 8), rows(12, 16, 2, 8), rows(3, 4,
        dtype=torch.int32), rows(4), rows(3), scale=1.0, query_start_loc_cpu=STARTS,
        seq_lens_cpu=LENGTHS, **FEATURES[feature],
    )  # fmt: skip
    assert [tuple(part.shape) for part in weights] == [(4, 1, 40), (4, 4, 9), (4, 0, 0)]


def test_lengths_on_the_device_synchronize() -> None:
    """Without the host copies, meta tensors do raise."""
    with pytest.raises((NotImplementedError, RuntimeError)):
        call_operation(
            paged_prefill, rows(6, 4, 8), rows(12, 16, 2, 8), rows(12, 16, 2, 8), rows(3, 4,
            dtype=torch.int32), rows(4), rows(3), max_query_len=4, max_seq_len=40, scale=1.0,
            out=rows(6, 4, 8),
        )  # fmt: skip
