"""Gates and norms of steps, in torch and in Triton, against formulas in float64."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from attnlib.ops.states.step_form import StepForm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = ["torch", "triton"]


def parts(package: str) -> Any:
    return import_module(f"attnlib.ops.{package}.states.step_parts")


def normal(*shape: int) -> torch.Tensor:
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def moved(form: StepForm) -> StepForm:
    tensors = {k: x.to(DEVICE) for k, x in vars(form).items() if torch.is_tensor(x)}
    return StepForm(**{**vars(form), **tensors})


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("gates", ["softplus", "bounded", "mamba2"])
def test_gates(package: str, width: int | None, gates: str) -> None:
    """Also where softplus is small: relative to each value."""
    if gates == "mamba2" and width:
        pytest.skip("step sizes are per head")
    shape = (3,) if width is None else (3, width)
    form = StepForm(
        gates=gates, rate=normal(3).exp(), bias=normal(*shape), beta_factor=2.0,
        bounds=(-5.0, 0.0) if gates == "bounded" else (1e-4, 3.0),
    )  # fmt: skip
    a, b = normal(18, *shape), normal(18, 6)[:, :3]
    a[0], a[1] = -30.0, 40.0
    given = (a.to(DEVICE), None if gates == "mamba2" else b.to(DEVICE))
    decay, beta = parts(package).state_gates(*given, moved(form))
    rate = form.rate.double() if width is None else form.rate.double()[:, None]
    shifted = a.double() + form.bias.double()
    size = shifted.exp().log1p().where(shifted < 30, shifted)
    wanted = 2.0 * b.double().sigmoid()
    if gates == "mamba2":
        size = wanted = size.clamp(*form.bounds)
    expected = -rate * size
    if gates == "bounded":
        expected = -5.0 * (rate * shifted).sigmoid()
    torch.testing.assert_close(decay.cpu().double(), expected, rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(beta.cpu().double(), wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("gate", "first", "size", "own"),
    [(None, False, 12, False), ("silu", True, 24, True), ("sigmoid", False, 12, False),
     ("silu", False, 48, False)],
)  # fmt: skip
def test_norms(package: str, gate: str | None, first: bool, size: int, own: bool) -> None:
    """Heads, groups of heads and all heads; weights per group; rows of zeros stay zero (T3)."""
    form = StepForm(
        norm_size=size, norm_weight=normal(48 if own else size), norm_eps=1e-3, output_gate=gate,
        gate_first=first,
    )  # fmt: skip
    out, z = normal(5, 4, 12).half(), normal(5, 48).half()
    out[3] = 0
    z[3] = torch.nan
    rows = out.double().view(5, -1, size)
    factor = z.double().view(rows.shape)
    factor = factor.sigmoid() * (factor if gate == "silu" else 1) if gate else 1
    rows = rows * factor if first else rows
    rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    rows = rows * form.norm_weight.double().view(-1, size) * (1 if first else factor)
    held = torch.full((5, 6, 12), 3.0, dtype=torch.float16)
    held[:, 1:5] = out
    held = held.to(DEVICE)
    parts(package).gated_norm(held[:, 1:5], z.to(DEVICE) if gate else None, moved(form))
    assert (held[:, [0, 5]] == 3).all()
    got = held[:, 1:5].cpu()
    assert not got[3].any()
    keep = [0, 1, 2, 4]
    expected = rows.view(5, 4, 12)[keep]
    torch.testing.assert_close(got[keep].double(), expected, rtol=1e-3, atol=1e-6)
