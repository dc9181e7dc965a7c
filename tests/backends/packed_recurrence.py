"""The recurrence that fakes of flash-linear-attention and FlashInfer compute: one packed row of
tokens, a state per request."""

from __future__ import annotations

import torch

__all__ = ["packed_recurrence"]


def packed_recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factor: torch.Tensor,
    beta: torch.Tensor | None, scale: float, initial: torch.Tensor, starts: torch.Tensor,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The recurrence in float32.

    Args:
        q, k: `[T, Hk, K]`.
        v: `[T, Hv, V]`.
        factor: `[T, Hv]` or `[T, Hv, K]`, the decay itself.
        beta: `[T, Hv]`, or None.
        scale: of q.
        initial: `[N, Hv, K, V]`.
        starts: `[N + 1]`.
        delta: whether an update replaces.

    Returns:
        `[T, Hv, V]` in the dtype of v, and `[N, Hv, K, V]`.
    """
    q, k = (x.float().repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out, final = torch.zeros_like(v), []
    for state, start, end in zip(initial.float(), starts, starts[1:], strict=False):
        for t in range(int(start), int(end)):
            state = state * (
                factor[t, ..., None] if factor.dim() == 3 else factor[t, :, None, None]
            )
            change = v[t].float()
            if delta:
                change = change - torch.einsum("hkv,hk->hv", state, k[t])
            if beta is not None:
                change = beta[t, :, None].float() * change
            state = state + k[t, :, :, None] * change[:, None]
            out[t] = scale * torch.einsum("hkv,hk->hv", state, q[t])
        final.append(state)
    return out, torch.stack(final)
