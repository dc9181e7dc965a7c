"""The recurrence of one request in its two forms: token by token, and a chunk in matrix form (T2).

Tensors are heads first: `[Hv, n, ...]`. Both forms compute in the dtype of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.states.inputs import LEAST_LOG_DECAY, QK_NORM_EPS, RecurrenceParams, StateInputs

__all__ = ["HeadInputs", "chunk", "head_inputs", "recur"]


class HeadInputs(NamedTuple):
    """The inputs of n tokens per state head, in the dtype of the computation.

    Attributes:
        query: `[Hv, n, Dk]`, normalized and scaled.
        key: `[Hv, n, Dk]`, normalized.
        value: `[Hv, n, Dv]`.
        log_decay: `[Hv, n, 1]` or `[Hv, n, Dk]`.
        beta: `[Hv, n]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor


def head_inputs(inputs: StateInputs, params: RecurrenceParams, dtype: torch.dtype) -> HeadInputs:
    """Convert, spread key heads over state heads (T4), normalize and scale."""
    count, heads = inputs.value.shape[:2]
    query, key = (_spread(x, heads, dtype) for x in (inputs.query, inputs.key))
    if params.qk_norm:
        query, key = (
            x * torch.rsqrt((x * x).sum(-1, keepdim=True) + QK_NORM_EPS) for x in (query, key)
        )
    decay = inputs.log_decay.to(dtype)
    decay = decay.expand(count, heads) if inputs.is_constant else decay
    decay = decay.unsqueeze(-1) if decay.dim() == 2 else decay
    beta = inputs.beta
    beta = query.new_ones(count, heads) if beta is None else beta.to(dtype)
    value = inputs.value.to(dtype).transpose(0, 1)
    return HeadInputs(query * params.scale, key, value, decay.transpose(0, 1), beta.transpose(0, 1))


def _spread(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[n, Hk, Dk]` -> `[Hv, n, Dk]`: state head h has key head h // (Hv / Hk)."""
    return x.to(dtype).transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


def recur(inputs: HeadInputs, state: Tensor, update: str) -> tuple[Tensor, list[Tensor]]:
    """The definition, token by token.

    Args:
        inputs: of n tokens.
        state: `[Hv, Dv, Dk]`, before them; not written.
        update: "delta" or "add".

    Returns:
        Outputs `[Hv, n, Dv]`, and the state after each token.
    """
    out, states = torch.empty_like(inputs.value), []
    decays = inputs.log_decay.exp()
    for t in range(inputs.value.shape[1]):
        key = inputs.key[:, t].unsqueeze(-1)  # [Hv, Dk, 1]
        state = state * decays[:, t].unsqueeze(-2)
        new = inputs.value[:, t]
        if update == "delta":
            new = new - (state @ key).squeeze(-1)
        new = inputs.beta[:, t, None] * new
        state = state + new.unsqueeze(-1) * key.mT
        out[:, t] = (state @ inputs.query[:, t].unsqueeze(-1)).squeeze(-1)
        states.append(state)
    return out, states


@without_autocast
def chunk(inputs: HeadInputs, state: Tensor, update: str) -> tuple[Tensor, Tensor]:
    """The same in matrix form, for all n tokens at once.

    A row depends on the rows up to its own only. With one n, rows of zeros past the last token
    change no bit of the rows before them. `exp` is taken of differences of cumulative decays, which
    are at most 0 (T5).

    Args:
        inputs, state, update: as in `recur`.

    Returns:
        Outputs `[Hv, n, Dv]`, and the state after the last token.
    """
    query, key, value, log_decay, beta = inputs
    # Differences of large sums: float64 keeps decays near 1 after fast ones exact.
    wide = value.dtype if value.device.type == "mps" else torch.float64
    total = log_decay.to(wide).clamp(min=LEAST_LOG_DECAY).cumsum(1)
    pair_qk, pair_kk = _decayed_products(query, key, total, need_keys=update == "delta")
    grown = total.to(value.dtype).exp()
    new = value
    if update == "delta":
        new = new - (key * grown) @ state.mT
    new = beta.unsqueeze(-1) * new
    if pair_kk is not None:
        # u_i = beta_i (v_i - S' k_i - sum of earlier u_j (k_j . k_i)): a triangular system.
        system = (beta.unsqueeze(-1) * pair_kk).tril(-1)
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
    out = (query * grown) @ state.mT + pair_qk @ new
    last = total[:, -1:]
    rest = (last - total).to(value.dtype).exp()
    return out, state * last.to(value.dtype).exp() + new.mT @ (key * rest)


def _decayed_products(
    query: Tensor, key: Tensor, total: Tensor, *, need_keys: bool
) -> tuple[Tensor, Tensor | None]:
    """`q_i . k_j` and `k_i . k_j` times the decay from j to i, `[Hv, n, n]`; 0 above the
    diagonal."""
    n = key.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool, device=key.device).tril()
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(~lower[..., None], -torch.inf)
    decay = between.to(key.dtype).exp()  # [Hv, n, n, 1 or Dk]
    if decay.shape[-1] == 1:
        decay = decay[..., 0]
        return (query @ key.mT) * decay, (key @ key.mT) * decay if need_keys else None
    weighted = decay * key.unsqueeze(1)  # [Hv, i, j, Dk]
    products = [(weighted @ x.unsqueeze(-1)).squeeze(-1) for x in (query, key)[: 1 + need_keys]]
    return products[0], products[1] if need_keys else None
