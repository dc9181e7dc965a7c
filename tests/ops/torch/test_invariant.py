"""M8: with `batch_invariant=True`, the bits of a row depend on that row and its keys only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.ops.calls import call_operation
from tests.ops.paged_case import make_case

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (21, -1)},
    "chunk": {"attention_chunk_size": 24},
    "cap_and_sinks": {"logits_soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])},
}


def run(case: Any, operation: Any, request: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Positions `[first, last)` of one request as the only ones of a batch."""
    query, key_cache, value_cache, table, starts, _ = case.tensors
    begin = int(starts[request])
    rows = query[begin + first : begin + last]
    out, lse = torch.empty_like(rows), torch.empty(rows.shape[:2])
    call_operation(
        operation, rows, key_cache, value_cache, table[request : request + 1], torch.tensor([0,
        last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32), **case.kwargs,
        out=out, lse=lse, batch_invariant=True,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("contiguous_pages", [False, True])
def test_bits_depend_on_the_row_alone(
    feature: str, dtype: torch.dtype, contiguous_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits: prefilled at once, in chunks or decoded, in a batch or alone."""
    monkeypatch.setattr("tests.ops.paged_case.naive_attention", lambda *args, **ignored: None)
    lens = (75, 33, 50)
    case = make_case(
        lens, lens, dtype=dtype, contiguous_pages=contiguous_pages, **FEATURES[feature]
    )
    out, lse = case.run(paged_prefill, batch_invariant=True)
    begin = 0
    for request, length in enumerate(lens):
        for first, last, operation in (
            (0, length, paged_prefill), (0, 7, paged_prefill), (7, 30, paged_decode), (29, length,
            paged_prefill), (20, 21, paged_decode), (length - 1, length, paged_decode),
        ):  # fmt: skip
            part = run(case, operation, request, first, last)
            assert torch.equal(part[0], out[begin + first : begin + last]), (request, first, last)
            assert torch.equal(part[1], lse[begin + first : begin + last]), (request, first, last)
        begin += length
