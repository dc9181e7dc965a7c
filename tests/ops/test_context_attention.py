"""`context_attention_fwd`: sequences with gaps in any order, and the window convention of vLLM."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops import context_attention, context_attention_fwd, get_block_size
from tests.ops.naive import naive_varlen_attention

HEADS, KV_HEADS = 4, 2
STARTS, LENS = (30, 2, 60, 15), (20, 11, 0, 1)


@pytest.fixture(params=["torch", "triton"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The function over both counterparts; Triton in its interpreter."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("interpreted without a GPU; tests/gpu/test_seed_operations.py runs on one")

    def load(module: str, name: str, rows: torch.Tensor) -> object:
        found: ModuleType = __import__(f"attnlib.ops.{request.param}.{module}", fromlist=[name])
        return getattr(found, name)

    monkeypatch.setattr(context_attention, "operation", load)
    return str(request.param)


def check(size: int = 32, dtype: torch.dtype = torch.int32, **options: object) -> None:
    """Compare each sequence with the visible keys, written out; other rows keep their content."""
    torch.manual_seed(1)
    q = torch.randn(64, HEADS, size)
    k, v = torch.randn(64, KV_HEADS, size), torch.randn(64, KV_HEADS, size)
    o = torch.full_like(q, 7.0)
    result = context_attention_fwd(
        q, k, v, o, torch.tensor(STARTS, dtype=dtype), torch.tensor(LENS, dtype=dtype), 24,
        **options,
    )  # fmt: skip
    assert result is None
    before = options.get("sliding_window_q") or math.inf
    after = options.get("sliding_window_k") or math.inf
    scale = options.get("softmax_scale") or size**-0.5
    untouched = torch.ones(64, dtype=torch.bool)
    for start, length in zip(STARTS, LENS, strict=True):
        rows = slice(start, start + length)
        untouched[rows] = False
        keys, values = (x[rows].double().repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * scale
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance > before) | (-distance > after)
        if options.get("is_causal", True):
            hidden |= distance < 0
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(o[rows].double(), wanted, atol=2e-5, rtol=2e-5)
    assert bool((o[untouched] == 7.0).all())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": False},
        {"softmax_scale": 0.5},
        {"sliding_window_q": 3},
        {"is_causal": False, "sliding_window_q": 2, "sliding_window_k": 5},
        {"is_causal": False, "sliding_window_q": 0, "sliding_window_k": 1},
        {"sliding_window_q": 0, "sliding_window_k": None},
    ],
    ids=str,
)
def test_gaps_windows_and_defaults(package: str, options: dict[str, object]) -> None:
    """A window counts the distance, 0 and None mean no window; GQA."""
    check(**options)


@pytest.mark.parametrize("size", [24, 80, 96])
def test_head_sizes_that_are_no_power_of_two(package: str, size: int) -> None:
    check(size, torch.int64)


def test_strided_tensors(package: str) -> None:
    """P9: views into one projection."""
    qkv = torch.randn(10, HEADS + 2 * KV_HEADS, 32)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    o = torch.zeros(10, 2, HEADS, 32)[:, 1]
    context_attention_fwd(q, k, v, o, torch.tensor([0]), torch.tensor([10]), 10)
    ends = torch.tensor([0, 10])
    wanted, _ = naive_varlen_attention(q, k, v, ends, ends, scale=32**-0.5, causal=True)
    torch.testing.assert_close(o.double(), wanted, atol=2e-5, rtol=2e-5)


def test_block_size() -> None:
    """The tile sizes of vLLM's kernel."""
    assert get_block_size(torch.float32) == 32
    recent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    assert get_block_size(torch.bfloat16) == (128 if recent else 64)


def test_shapes_that_do_not_fit() -> None:
    q, k, lens = torch.zeros(4, 4, 32), torch.zeros(4, 3, 32), torch.tensor([4])
    with pytest.raises(ContractError, match="Hq a multiple of Hkv"):
        context_attention_fwd(q, k, k, q.clone(), lens, lens, 4)
    with pytest.raises(ContractError, match="one element per sequence"):
        context_attention_fwd(q, q, q, q.clone(), torch.tensor([0]), torch.tensor([1, 2]), 4)
    with pytest.raises(ContractError, match="Hq a multiple of Hkv"):
        context_attention_fwd(q[0], q, q, q.clone(), lens, lens, 4)


def test_cumulative_starts_and_tensors_with_further_rows(package: str) -> None:
    """Only rows of sequences are read and written, and only the first R starts."""
    q = torch.randn(12, HEADS, 32)
    k, v = torch.full((2, 20, KV_HEADS, 32), math.nan)
    k[:12], v[:12] = torch.randn(2, 12, KV_HEADS, 32)
    o, starts = torch.full((17, HEADS, 32), 7.0), torch.tensor([0, 5, 12])
    context_attention_fwd(q, k, v, o, starts, starts.diff(), 7)
    wanted, _ = naive_varlen_attention(
        q, k[:12], v[:12], starts, starts, scale=32**-0.5, causal=True
    )
    torch.testing.assert_close(o[:12].double(), wanted, atol=2e-5, rtol=2e-5)
    assert bool((o[12:] == 7.0).all())


def test_fewer_keys_than_the_sequences_need_are_refused() -> None:
    q, kv, out = torch.zeros(8, HEADS, 16), torch.zeros(6, KV_HEADS, 16), torch.ones(8, HEADS, 16)
    with pytest.raises(ContractError, match=r"b_start_loc \+ b_seq_len\[0\]=8 must be from 0 to 6"):
        context_attention_fwd(q, kv, kv, out, torch.tensor([0]), torch.tensor([8]), 8)
    assert bool((out == 1).all())


@pytest.mark.parametrize(
    ("start", "length", "message"),
    [
        ([0, 5], [4, 4], r"b_start_loc \+ b_seq_len\[1\]=9 must be from 0 to 8"),
        ([0, -1], [4, 4], r"b_start_loc\[1\]=-1"),
        ([0, 4], [4, -1], r"b_seq_len\[1\]=-1"),
        ([0, 0], [4, 8], r"b_seq_len\[1\]=8 must be from 0 to 6, max_input_len"),
    ],
)
def test_sequences_outside_of_the_tokens_are_refused(
    start: list[int], length: list[int], message: str
) -> None:
    q, kv, out = torch.zeros(8, HEADS, 16), torch.zeros(8, KV_HEADS, 16), torch.ones(8, HEADS, 16)
    with pytest.raises(ContractError, match=message):
        context_attention_fwd(q, kv, kv, out, torch.tensor(start), torch.tensor(length), 6)
    assert bool((out == 1).all())
