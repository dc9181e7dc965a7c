"""Prefills whose score function selects keys, over several tiles of keys, against float64 (M10).

On Hopper they run in the Gluon kernel: functions with exact bounds as masks, others on the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.score_functions import ScoreFunction, builtin
from attnlib.testing.case import Case
from attnlib.testing.runner import compare_with_oracle, run_case
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = torch.device("cuda")
BATCHES = {
    "several tiles": "q300s1000_q513_q64s700_q130s135",
    "short and empty": "q1s400_q0s30_q70s71_q257_q9s900",
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"sinks": True, "logits_soft_cap": 20.0, "needs_lse": True},
}


def _document_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    lengths = [[(3, 40, 129, 257)[i % 4] for i in range(n // 50 + 1)] for n in seq_lens]
    return builtin.document_tensors(lengths, max(seq_lens, default=1))


def _window_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    windows = [(1, 64, 300, 7, 128, 500)[head % 6] for head in range(num_heads)]
    return {"window": torch.tensor(windows, dtype=torch.int32)}


def _span_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    spans = [[(n, min(n + 200, length)) for n in range(5, length, 231)] for length in seq_lens]
    return builtin.span_tensors(spans, max(seq_lens, default=1))


def _with_examples(function: ScoreFunction, examples: Any) -> ScoreFunction:
    names = function.tensor_names

    def chosen(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
        made = examples(num_heads, seq_lens)
        return {name: made[name] for name in names}

    changed = object.__new__(ScoreFunction)
    changed.__dict__.update({**function.__dict__, "examples": chosen})
    return changed


DOCUMENTS = _with_examples(builtin.documents(), _document_examples)
CLOSED_DOCUMENTS = _with_examples(builtin.documents(causal=False), _document_examples)
HEAD_WINDOWS = _with_examples(builtin.head_windows(1, 500), _window_examples)
SPANS = _with_examples(builtin.bidirectional_spans(), _span_examples)
WINDOWED_SPANS = _with_examples(builtin.bidirectional_spans(100), _span_examples)
PREFIX_LM = builtin.prefix_lm()
BLOCK_DIFFUSION = builtin.block_diffusion(100)
MULTI_ITEM = builtin.multi_item()
FUNCTIONS = (
    "DOCUMENTS", "CLOSED_DOCUMENTS", "HEAD_WINDOWS", "SPANS", "WINDOWED_SPANS", "PREFIX_LM",
    "BLOCK_DIFFUSION", "MULTI_ITEM",
)  # fmt: skip
SHAPES = [(128, (8, 2)), (128, (4, 4)), (64, (16, 2))]
CASES = [
    (name, *shape, list(FEATURES)[(number + place) % 2])
    for number, name in enumerate(FUNCTIONS)
    for place, shape in enumerate(SHAPES)
]
"""A kernel each: all pairs of function, shape and features."""


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "head_size", "heads", "features"), CASES)
def test_functions_that_select_keys(
    name: str, head_size: int, heads: tuple[int, int], batch: str, features: str
) -> None:
    """M10, M6, P5: also rows and requests without keys, and values past the ends that are NaN."""
    function = globals()[name]
    case = Case(
        batch=BATCHES[batch], score=f"{__name__}:{name}", head_size=head_size, num_heads=heads[0],
        num_kv_heads=heads[1], dtype="bfloat16",
        mask="bidirectional" if function.needs_bidirectional else "causal", **FEATURES[features],
    )  # fmt: skip
    error = compare_with_oracle(case, run_case(TritonBackend, case, DEVICE), DEVICE)
    assert not error, error
