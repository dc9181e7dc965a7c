"""Attention over packed keys and values without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.ops.triton.varlen_prefill import varlen_prefill
from tests.ops.calls import call_operation
from tests.ops.naive import naive_varlen_attention
from tests.ops.triton.features import FEATURES, feature_options
from tests.ops.triton.paged_inputs import DTYPES, assert_close


@dataclass
class Packed:
    query: Tensor
    key: Tensor
    value: Tensor
    starts_q: Tensor
    starts_k: Tensor
    bounds: dict[str, Any]

    def check(self, **options: Any) -> None:
        tokens, heads, d = self.query.shape
        out = torch.full((tokens, heads, self.value.shape[2]), float("nan"), dtype=self.query.dtype,
                         device=self.query.device)  # fmt: skip
        lse = torch.full((tokens, heads), float("nan"), device=self.query.device)
        arguments = (self.query, self.key, self.value, self.starts_q, self.starts_k)
        options = {"scale": d**-0.5, "causal": False, **options}
        call_operation(varlen_prefill, *arguments, **self.bounds, **options, out=out, lse=lse)
        want_out, want_lse = naive_varlen_attention(*arguments, **options)
        assert_close(out, want_out, self.query.dtype)
        assert_close(lse, want_lse, self.query.dtype, "lse")


def _packed(
    device: torch.device,
    lens_q: list[int],
    lens_k: list[int],
    *,
    heads: int = 2,
    kv_heads: int = 2,
    d: int = 32,
    dv: int = 0,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Packed:
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    starts = [torch.tensor([0, *lens]).cumsum(0).int().to(device) for lens in (lens_q, lens_k)]
    key, value = rand(sum(lens_k) + 2, kv_heads, d), rand(sum(lens_k) + 2, kv_heads, dv or d)
    key[sum(lens_k) :], value[sum(lens_k) :] = float("nan"), float("nan")
    bounds = {"max_seqlen_q": max(lens_q, default=1), "max_seqlen_k": max(lens_k, default=1)}
    return Packed(rand(sum(lens_q) + padding, heads, d), key, value, starts[0], starts[1], bounds)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_features(device: torch.device, feature: str) -> None:
    """M1 to M6: every feature over ragged, packed spans."""
    lens = [35, 1, 0, 20]
    packed = _packed(device, lens, lens, padding=2)
    packed.check(**feature_options(
        feature, requests=4, tokens=packed.query.shape[0], heads=2, max_query_len=35, device=device
    ))  # fmt: skip


def test_encoder_decoder_lengths(device: torch.device) -> None:
    """Cross attention: more queries than keys and more keys than queries."""
    packed = _packed(device, [20, 3, 5, 0], [7, 40, 0, 9])
    packed.check(causal=False)
    packed.check(causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "dv"),
    [(2, 2, 16, 16), (6, 2, 40, 24), (2, 1, 96, 96), (1, 1, 64, 64)],
)
def test_shapes_and_dtypes(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int, dv: int
) -> None:
    """Including head sizes that are not powers of two, and values of another size."""
    _packed(
        device, [17, 30], [17, 30], heads=heads, kv_heads=kv_heads, d=d, dv=dv, dtype=dtype
    ).check()


def test_views_of_a_fused_projection(device: torch.device) -> None:
    """P9: q, k and v that are slices of one tensor."""
    fused = torch.randn(24, 3, 2, 16, device=device)
    starts = torch.tensor([0, 24], dtype=torch.int32, device=device)
    Packed(
        fused[:, 0],
        fused[:, 1],
        fused[:, 2],
        starts,
        starts,
        {"max_seqlen_q": 24, "max_seqlen_k": 24},
    ).check()


def test_empty_batch(device: torch.device) -> None:
    """M7: no tokens."""
    _packed(device, [0], [4]).check()
