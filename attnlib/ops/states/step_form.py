"""`StepForm`: gates before a recurrence and the norm after it, for `StateLayer.step`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count

__all__ = ["FusedInputs", "StepForm"]

_CHOICES = {
    "order": ("qkv", "vkq"),
    "gates": ("given", "softplus", "bounded", "mamba2"),
    "output_gate": (None, "silu", "sigmoid"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class StepForm:
    """What a step computes around convolution and recurrence, in float32 and rounded once.

    Attributes:
        order: of the channels of the convolution: "qkv", or "vkq" as in Mamba2 (x, B, C).
        gates: how the gates of a call become (log decay, beta), see `attnlib.ops.state_gates`:
            "given" takes them as they are; "softplus" and "bounded" are the formulas of delta
            rules, with beta = `beta_factor` * sigmoid(b); "mamba2" takes the step size only.
        rate, bias: exp(A_log) `[Hv]` and dt_bias `[Hv]` or `[Hv, Dk]`, float32; None if given.
        bounds: smallest and largest step size of "mamba2"; the first is the bound of "bounded".
        beta_factor: 2 with negative eigenvalues.
        norm_size: elements of an RMS norm of the output, a multiple of Dv; 0 for none.
        norm_weight: `[norm_size]`, or `[Hv * Dv]` with a weight per group.
        norm_eps: added to the mean of squares.
        output_gate: "silu" or "sigmoid" of z, which multiplies the output; None for none.
        gate_first: it is multiplied before the norm.

    Raises:
        ContractError: another value, or a missing tensor.
    """

    order: str = "qkv"
    gates: str = "given"
    rate: Tensor | None = None
    bias: Tensor | None = None
    bounds: tuple[float, float] = (0.0, math.inf)
    beta_factor: float = 1.0
    norm_size: int = 0
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    output_gate: str | None = None
    gate_first: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ContractError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        object.__setattr__(self, "norm_size", as_count("norm_size", self.norm_size))
        if not (isinstance(self.norm_eps, int | float) and 0 <= self.norm_eps < math.inf):
            raise ContractError(f"norm_eps={self.norm_eps!r} must be a finite number of at least 0")
        # Configurations that were read from files have lists, and a form is part of keys.
        object.__setattr__(self, "bounds", tuple(self.bounds))
        raw, has_norm = self.gates != "given", self.norm_size > 0
        for name, needed in (("rate", raw), ("bias", raw), ("norm_weight", has_norm)):
            if needed is (getattr(self, name) is None):
                action = "pass it" if needed else "leave it out"
                raise ContractError(
                    f"{name} with gates={self.gates!r}, norm_size={self.norm_size}: {action}"
                )
        if self.output_gate and not has_norm:
            raise ContractError(
                f"output_gate={self.output_gate!r} with norm_size=0: a gate needs a norm"
            )

    @property
    def scalars(self) -> tuple[object, ...]:
        """Everything but the tensors."""
        kinds = (self.order, self.gates, self.bounds, self.beta_factor)
        return (*kinds, self.norm_size, self.norm_eps, self.output_gate, self.gate_first)


class FusedInputs(NamedTuple):
    """The inputs of `StateLayer.step`.

    Attributes:
        x: `[T, C]`, before the convolution.
        a, b: the gates, `[T, Hv]`; `a` is `[T, Hv, Dk]` for decays per channel, or `[Hv]` where it
            is given and constant. `b` is None where there is none.
        z: `[T, Hv * Dv]`, or None.
        form: of the step.
    """

    x: Tensor
    a: Tensor
    b: Tensor | None
    z: Tensor | None
    form: StepForm
