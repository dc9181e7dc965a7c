"""Gates of state layers against their formulas in float64."""

from __future__ import annotations

import torch

from attnlib.ops.state_gates import bounded_decay, mamba2_gates, softplus_decay


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-6)


def test_softplus_decay() -> None:
    a, a_log, bias = drawn(5, 3).bfloat16(), drawn(3), drawn(3) - 1
    wanted = -a_log.double().exp() * (1 + (a.double() + bias.double()).exp()).log()
    close(softplus_decay(a, a_log, bias), wanted)
    channels = drawn(5, 3, 4)
    per_head = a_log[:, None], bias[:, None]
    torch.testing.assert_close(
        softplus_decay(channels, *per_head)[..., 2],
        softplus_decay(channels[..., 2].contiguous(), a_log, bias),
    )


def test_bounded_decay() -> None:
    a, a_log, bias = drawn(5, 3), drawn(3), drawn(3)
    gate = 1 / (1 + (-a_log.double().exp() * (a.double() + bias.double())).exp())
    close(bounded_decay(a, a_log, bias, -5.0), -5 * gate)
    assert bounded_decay(torch.full((1, 3), 99.0), a_log, bias, -5.0).min() >= -5


def test_mamba2_gates() -> None:
    """The limits of the step size hold for a single token too."""
    dt, a_log, bias = 4 * drawn(7, 3), drawn(3), drawn(3)
    size = (1 + (dt.double() + bias.double()).exp()).log()
    decay, beta = mamba2_gates(dt, a_log, bias)
    close(beta, size)
    close(decay, -a_log.double().exp() * size)
    decay, beta = mamba2_gates(dt, a_log, bias, (0.01, 0.5))
    close(beta, size.clamp(0.01, 0.5))
    one, _ = mamba2_gates(dt[:1], a_log, bias, (0.01, 0.5))
    assert torch.equal(one, decay[:1]) and beta.max() == 0.5
