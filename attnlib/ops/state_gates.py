"""Gates of the models with state layers: log decays and betas from the projections.

The formulas differ from model to model, so they are ordinary operations before the layer and not
part of its contract. All compute in float32 and return float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["bounded_decay", "mamba2_gates", "softplus_decay"]


def softplus_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`-exp(A_log) * softplus(a + dt_bias)`: gated delta net and Kimi delta attention.

    Args:
        a: `[T, Hv]` or `[T, Hv, Dk]`, the projection, floating point.
        a_log, dt_bias: tensors of the layer that broadcast with `a`, floating point.

    Returns:
        The natural logarithm of the decay, float32 with the shape of `a`, at most 0.
    """
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())


def bounded_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """`lower_bound * sigmoid(exp(A_log) * (a + dt_bias))`: Kimi delta attention with a bound.

    Args:
        a, a_log, dt_bias: as in `softplus_decay`.
        lower_bound: the smallest log decay, such as -5.

    Returns:
        The natural logarithm of the decay, float32, between `lower_bound` and 0.
    """
    return lower_bound * (a_log.float().exp() * (a.float() + dt_bias.float())).sigmoid()


def mamba2_gates(
    dt: Tensor, a_log: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float] = (0.0, float("inf"))
) -> tuple[Tensor, Tensor]:
    """The gates of Mamba2: `dt = clamp(softplus(dt + dt_bias))`, log decay `-exp(A_log) * dt`.

    The recurrence of Mamba2 has q = C, k = B, v = x, scale 1 and skip D. The clamp belongs to the
    token: prefills and decodes have it.

    Args:
        dt: `[T, Hv]`, the projection, floating point.
        a_log, dt_bias: `[Hv]`, floating point.
        dt_limit: smallest and largest step size.

    Returns:
        (log decay, beta), `[T, Hv]` float32 each; beta is the step size.
    """
    size = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    return -a_log.float().exp() * size, size
