"""The rules T1 to T6 in float64, token by token and head by head. Shares no code with `ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.spec import StateSpec

__all__ = ["convolve", "recurrence"]


def recurrence(
    spec: StateSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    *,
    scale: float,
    skip: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    rounded_norm: torch.dtype | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state of one request.

    Args:
        spec: of the layer.
        query, key: `[n, Hk, Dk]`.
        value: `[n, Hv, Dv]`.
        log_decay: `[n, Hv]`, `[n, Hv, Dk]` or `[Hv]`.
        beta: `[n, Hv]`, or None.
        scale: factor of q.
        skip: `[Hv]`, or None.
        dtype: of the computation.
        rounded_norm: dtype to which normalized heads are rounded, which T4 allows; None for none.
        initial: `[Hv, Dv, Dk]`, the state before these tokens; None if they are the first ones.

    Returns:
        `[n, Hv, Dv]` and `[Hv, Dv, Dk]`.
    """
    count, heads = value.shape[:2]
    outputs, states = [], []
    for h in range(heads):
        at = h * spec.num_key_heads // spec.num_heads
        q, k = (_normed(spec, x[:, at].to(dtype), rounded_norm) for x in (query, key))
        v = value[:, h].to(dtype)
        decay = (log_decay[h].expand(count) if log_decay.dim() == 1 else log_decay[:, h]).to(dtype)
        state = torch.zeros(spec.key_size, spec.value_size, dtype=dtype)  # [Dk, Dv], unlike slots
        if initial is not None:
            state = initial[h].T.to(dtype)
        rows = []
        for t in range(count):
            factor = torch.exp(decay[t])
            state = (factor[:, None] if factor.dim() else factor) * state
            change = v[t] - k[t] @ state if spec.update == "delta" else v[t]
            if beta is not None:
                change = change * beta[t, h].to(dtype)
            state = state + torch.outer(k[t], change)
            row = scale * (q[t] @ state)
            rows.append(row if skip is None else row + skip[h].to(dtype) * v[t])
        outputs.append(torch.stack(rows) if rows else v)
        states.append(state.T)
    return torch.stack(outputs, dim=1), torch.stack(states)


def _normed(spec: StateSpec, rows: Tensor, rounding: torch.dtype | None) -> Tensor:
    if not spec.qk_norm:
        return rows
    normed = rows / torch.sqrt(rows.pow(2).sum(dim=1, keepdim=True) + 1e-6)
    return normed if rounding is None else normed.to(rounding).to(rows.dtype)


def convolve(
    spec: StateSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The convolution of one request from its first token on (T6), `[n, C]`."""
    count, channels = x.shape
    rows = []
    for t in range(count):
        total = torch.zeros(channels, dtype=dtype)
        for back in range(min(spec.conv_width, t + 1)):
            total = total + weight[:, spec.conv_width - 1 - back].to(dtype) * x[t - back].to(dtype)
        if bias is not None:
            total = total + bias.to(dtype)
        rows.append(total * torch.sigmoid(total) if spec.conv_activation == "silu" else total)
    return torch.stack(rows) if rows else x.to(dtype)
