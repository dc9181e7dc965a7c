"""Gates before a recurrence and the norm after it (`StepForm`)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.states.step_form import StepForm

__all__ = ["gated_norm", "sigmoid", "state_gates"]


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid, by `exp`. Bits of torch's own sigmoid, SiLU and softplus differ at the end of a
    tensor on a CPU, and those of a row must not depend on its place (T18)."""
    return 1 / (1 + (-x).exp())


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


@torch.no_grad()
@without_autocast
def state_gates(a: Tensor, b: Tensor | None, form: StepForm) -> tuple[Tensor, Tensor | None]:
    """The gates of a recurrence, by a formula of `StepForm` other than "given".

    Args:
        a, b: as in `FusedInputs`.
        form: the formula and its tensors.

    Returns:
        (log decay, beta) in float32, dense.
    """
    rate, bias = form.rate, form.bias
    assert rate is not None and bias is not None  # `StepForm` checks it
    shifted = a.float() + bias
    if form.gates == "mamba2":
        size = _softplus(shifted).clamp(*form.bounds)
        return -rate * size, size
    rate = rate if a.dim() == 2 else rate[:, None]
    if form.gates == "bounded":
        decay = form.bounds[0] * sigmoid(rate * shifted)
    else:
        decay = -rate * _softplus(shifted)
    return decay, None if b is None else sigmoid(b.float()) * form.beta_factor


@torch.no_grad()
@without_autocast
def gated_norm(out: Tensor, z: Tensor | None, form: StepForm) -> None:
    """Normalize outputs `[T, Hv, Dv]` in place. A zero stays zero whatever its gate is (T3).

    Args:
        out: of the recurrence.
        z: `[T, Hv * Dv]`, or None.
        form: with a norm.
    """
    weight, size = form.norm_weight, form.norm_size
    assert weight is not None  # `StepForm` checks it
    x = out.float().reshape(len(out), out.shape[1] * out.shape[2] // size, size)
    factor = x
    if z is not None:
        gate = z.float().reshape(x.shape)
        factor = sigmoid(gate)
        factor = factor if form.output_gate == "sigmoid" else gate * factor
        if form.gate_first:
            x = torch.where(x == 0, x, x * factor)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.norm_eps)
    x = x * weight.float().view(-1, size)
    if z is not None and not form.gate_first:
        x = torch.where(x == 0, x, x * factor)
    out.copy_(x.flatten(1).view(out.shape))
