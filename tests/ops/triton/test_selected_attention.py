"""M11: the Triton operation over selected keys against the torch operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import selected_attention as torch_operation
from attnlib.ops.triton import selected_attention as triton_operation
from attnlib.sparse.key_selection import KeySelection
from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.key_selection import make_lists
from attnlib.testing.score_functions import POSITIONS as SCORE

BATCH = "q1s37_q7s20_q2s75_q0s5_q1s1"


def _run(
    selection: KeySelection,
    *,
    batch: str = BATCH,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    size: int = 16,
    latent: int = 0,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    everything: bool = False,
    **params: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest errors of output and LSE, of a batch with three padding rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = parse_batch(batch)
    columns = -(-lengths.max_seq_len // block_size)
    num_blocks = lengths.num_reqs * columns
    shape = (num_blocks, block_size, num_kv_heads, size)
    key = torch.randn(shape, generator=generator).to(dtype)
    value = key[..., :latent] if latent else torch.randn(shape, generator=generator).to(dtype)
    table = torch.randperm(num_blocks, generator=generator).view(-1, columns).int()
    tokens = lengths.num_actual_tokens
    query = torch.randn(tokens + 3, num_heads, size, generator=generator).to(dtype)
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    seq_lens = torch.tensor(lengths.seq_lens).int()
    lists = make_lists(selection, lengths, num_heads, num_kv_heads, 1, everything).to("cpu")
    found = []
    for operation in (torch_operation, triton_operation):
        out = torch.full((tokens + 3, num_heads, value.shape[3]), torch.nan, dtype=dtype)
        lse = torch.full((tokens + 3, num_heads), torch.nan)
        operation.selected_attention(
            query, key, value, table, starts, seq_lens, AttentionParams(scale=0.3, **params),
            selection, lists, out=out, lse=lse,
        )  # fmt: skip
        assert not out[tokens:].any() and (lse[tokens:] == -torch.inf).all()  # M6
        found.append((out.float(), lse))
    (out, lse), (other, other_lse) = found
    assert torch.equal(lse.isinf(), other_lse.isinf())
    lse_error = torch.where(lse == other_lse, 0.0, lse - other_lse).abs().max()
    return (out - other).abs().max(), lse_error


FORMS = [(1, 24, 1), (4, 5, 1), (64, 2, 1), (16, 3, 4), (3, 7, 6)]
FAST = {("all_heads", (1, 24, 1)), ("kv_head", (64, 2, 1)), ("query_head", (16, 3, 4)),
        ("all_heads", (3, 7, 6))}  # fmt: skip


@pytest.mark.parametrize(
    ("scope", "block_size", "max_blocks", "query_block_size"),
    [
        pytest.param(scope, *form, marks=() if (scope, form) in FAST else pytest.mark.slow)
        for scope in ("all_heads", "kv_head", "query_head")
        for form in FORMS
    ],
)
def test_it_agrees_with_torch(
    scope: str, block_size: int, max_blocks: int, query_block_size: int
) -> None:
    selection = KeySelection(
        scope=scope,  # type: ignore[arg-type]  # the constructor converts the name
        block_size=block_size,
        max_blocks=max_blocks,
        query_block_size=query_block_size,
    )
    out, lse = _run(selection, sinks=torch.tensor([0.5, -1.0, 2.0, -torch.inf]))
    assert out < 2e-6 and lse < 2e-6


@pytest.mark.parametrize(
    "params",
    [
        {"window": (9, -1)},
        {"window": (9, 3), "causal": False},
        {"attention_chunk_size": 12, "logits_soft_cap": 2.0},
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
        {"causal": torch.tensor([True, False, True, True, False])},
        {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": 0.25},
    ],
    ids=["window", "two-sided", "chunk-cap", "alibi", "flags", "scales"],
)
def test_features(params: dict[str, Any]) -> None:
    selection = KeySelection(scope="kv_head", block_size=8, max_blocks=3)  # type: ignore[arg-type]
    out, lse = _run(selection, **params)
    assert out < 4e-6 and lse < 4e-6


def test_splits_and_long_lists() -> None:
    """A few queries with long lists are split; the sink counts once (M4)."""
    selection = KeySelection(max_blocks=700)
    out, lse = _run(selection, batch="q1s1400_q2s650", sinks=torch.ones(4), block_size=16)
    assert out < 2e-6 and lse < 2e-6


def test_values_that_are_a_prefix_of_the_keys() -> None:
    """Latents: 64 + 32 elements, of which 64 are the values, and a prefix that is no chunk."""
    selection = KeySelection(max_blocks=20)
    for latent in (64, 48):
        out, lse = _run(selection, num_kv_heads=1, size=96, latent=latent)
        assert out < 4e-6 and lse < 4e-6


def test_float16() -> None:
    selection = KeySelection(scope="kv_head", block_size=16, max_blocks=2)  # type: ignore[arg-type]
    out, lse = _run(selection, dtype=torch.float16)
    assert out < 4e-3 and lse < 4e-3


def test_unsupported_parameters_are_refused() -> None:
    selection = KeySelection(max_blocks=2)
    with pytest.raises(UnsupportedConfigError, match="no query bias and no score functions"):
        _run(selection, score_function=SCORE)
