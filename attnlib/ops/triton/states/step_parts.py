"""Gates before a recurrence and the norm after it, one launch each (`kernels/step_parts.py`)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.ops.states.step_form import StepForm
from attnlib.ops.triton.kernels import step_parts
from attnlib.ops.triton.states.launch import KernelLaunch

__all__ = ["gated_norm", "norm_launch", "state_gates", "step_config"]

_TOKENS = 16
"""Tokens of a program of the gates."""


def state_gates(a: Tensor, b: Tensor | None, form: StepForm) -> tuple[Tensor, Tensor | None]:
    """See `attnlib.ops.torch.states.step_parts.state_gates`; heads of `a` and `b` are dense."""
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    has_beta = b is not None or form.gates == "mamba2"
    beta = torch.empty(a.shape[:2], dtype=decay.dtype, device=a.device) if has_beta else None
    assert form.rate is not None and form.bias is not None  # `StepForm` checks it
    if a.numel():
        config = step_config(a, b, None, decay, form, has_beta, _TOKENS)
        tensors = (a, a if b is None else b, form.rate, form.bias)
        grid = (triton.cdiv(a.shape[0], _TOKENS), a.shape[1])
        outputs = (decay, decay if beta is None else beta)
        kernel = step_parts.state_gates_kernel
        KernelLaunch(kernel, config, grid, (a.shape[0],)).run(*tensors, *outputs)
    return decay, beta


def gated_norm(out: Tensor, z: Tensor | None, form: StepForm) -> None:
    """See `attnlib.ops.torch.states.step_parts.gated_norm`; rows of `out` and `z` are dense."""
    assert form.norm_weight is not None  # `StepForm` checks it
    if out.numel():
        norm_launch(out, z, form).run(out, out if z is None else z, form.norm_weight)


def norm_launch(out: Tensor, z: Tensor | None, form: StepForm) -> KernelLaunch:
    """The launch of `gated_norm`; takes outputs, gates (outputs if there are none) and weights."""
    config = step_config(out, None, z, out, form, False, 1)
    grid = (out.shape[0], out.shape[1] * out.shape[2] // form.norm_size)
    return KernelLaunch(step_parts.gated_norm_kernel, config, grid)


def step_config(
    a: Tensor,
    b: Tensor | None,
    z: Tensor | None,
    out: Tensor,
    form: StepForm,
    has_beta: bool,
    tokens: int,
) -> step_parts.StepConfig:
    """The constants of a call; `out` is `[T, Hv, ...]`, and a program has `tokens` tokens."""
    channels, size = a.shape[2] if a.dim() == 3 else 1, form.norm_size
    has_weights = form.norm_weight is not None and form.norm_weight.shape[0] > size
    return step_parts.StepConfig(
        HV=out.shape[1],
        DK=channels,
        CHANNELS=triton.next_power_of_2(channels),
        TOKENS=tokens,
        GATES=step_parts.GATES[form.gates],
        LOW=form.bounds[0],
        HIGH=min(form.bounds[1], torch.finfo(torch.float32).max),
        BETA=form.beta_factor,
        HAS_BETA=has_beta,
        NORM=size > 0,
        SIZE=size,
        WIDTH=triton.next_power_of_2(max(size, 1)),
        EPS=form.norm_eps,
        HAS_Z=z is not None,
        GATE_FIRST=form.gate_first,
        SIGMOID=form.output_gate == "sigmoid",
        A_T=a.stride(0),
        B_T=0 if b is None else b.stride(0),
        Z_T=0 if z is None else z.stride(0),
        O_T=out.stride(0),
        WEIGHT_G=size if has_weights else 0,
    )
