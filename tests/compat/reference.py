"""Attention in float64, written from the definition of FlashAttention's arguments."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[Sq, Hq, Dv]` and LSE `[Sq, Hq]` of one request, float64, on the CPU.

    Args:
        q: `[Sq, Hq, D]`.
        k, v: `[Sk, Hkv, D]` and `[Sk, Hkv, Dv]`.
        slopes: `[Hq]`.
        chunk: positions per attention chunk.
    """
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    column = torch.arange(k.shape[0])[None]
    if slopes is not None:
        scores = scores - slopes.double().cpu()[:, None, None] * (row - column).abs()
    hidden = torch.zeros(row.shape[0], column.shape[1], dtype=torch.bool)
    if causal:
        hidden |= column > row
    if window[0] >= 0:
        hidden |= column < row - window[0]
    if window[1] >= 0:
        hidden |= column > row + window[1]
    if chunk:
        hidden |= column.div(chunk, rounding_mode="floor") != row.div(chunk, rounding_mode="floor")
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def assert_matches(
    got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Compare float32 results `[Sq, Hq, Dv]` and `[Sq, Hq]` with the reference."""
    for ours, reference in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.cpu().double(), reference, rtol=2e-5, atol=2e-5)
