"""Inputs of state layers: tensors of a layer, and the tokens of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.spec import StateSpec

__all__ = ["LayerTensors", "TokenInputs", "draw_layer", "draw_tokens", "joined"]

_NAMES = ("x", "query", "key", "value", "log_decay", "beta")


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """The inputs of n tokens; what a layer does not have is None.

    Attributes:
        x: `[n, C]`, for the convolution. Its result is not what the recurrence gets, so that the
            two are compared one by one.
        query, key: `[n, Hk, Dk]`.
        value: `[n, Hv, Dv]`.
        log_decay: `[n, Hv]` or `[n, Hv, Dk]` float32; None if the layer has a constant one.
        beta: `[n, Hv]` float32.
    """

    x: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    log_decay: Tensor | None = None
    beta: Tensor | None = None

    def __len__(self) -> int:
        return next(len(x) for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        named = {name: getattr(self, name) for name in _NAMES}
        return {name: x for name, x in named.items() if x is not None}

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenInputs:
        """Other inputs, of which `change` makes each tensor."""
        return TokenInputs(**{name: change(x) for name, x in self.tensors().items()})

    def rows(self, first: int, end: int) -> TokenInputs:
        """Tokens `[first, end)`."""
        return self.each(lambda x: x[first:end])


def joined(parts: Sequence[TokenInputs]) -> TokenInputs:
    """The tokens of several inputs, packed."""
    names = parts[0].tensors()
    return TokenInputs(
        **{name: torch.cat([part.tensors()[name] for part in parts]) for name in names}
    )


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """The tensors of a layer; what it does not have is None.

    Attributes:
        scale: factor of q.
        conv_weight: `[C, W]` in the dtype of the layer.
        conv_bias: `[C]`.
        skip: `[Hv]` float32.
        log_decay: `[Hv]` float32, of a constant decay.
    """

    scale: float
    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None
    skip: Tensor | None = None
    log_decay: Tensor | None = None


def draw_layer(spec: StateSpec, seed: int = 0, scale: float | None = None) -> LayerTensors:
    """Random tensors of a layer, on the CPU."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    constant = -torch.linspace(0.02, 0.6, max(spec.num_heads, 1))
    return LayerTensors(
        scale=spec.default_scale if scale is None else scale,
        conv_weight=normal(spec.conv_channels, spec.conv_width).to(spec.dtype)
        if spec.has_convolution
        else None,
        conv_bias=normal(spec.conv_channels).to(spec.dtype) if spec.has_conv_bias else None,
        skip=normal(spec.num_heads) if spec.has_skip else None,
        log_decay=constant if spec.has_recurrence and spec.decay == "constant" else None,
    )


def draw_tokens(spec: StateSpec, count: int, seed: int) -> TokenInputs:
    """Random tokens of a request, on the CPU. Decays are those of trained models: most near 1, some
    fast."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=random).to(spec.dtype)

    x = normal(spec.conv_channels) if spec.has_convolution else None
    if not spec.has_recurrence:
        return TokenInputs(x)
    heads = spec.num_heads
    decays = (heads, spec.key_size) if spec.decay == "channel" else (heads,)
    log_decay = -(torch.rand(count, *decays, generator=random) ** 3) * 2
    beta = torch.rand(count, heads, generator=random)
    key = normal(spec.num_key_heads, spec.key_size)
    if not spec.qk_norm:  # an update with long keys grows without bound
        key = (key.float() * spec.key_size**-0.5).to(spec.dtype)
    return TokenInputs(
        x,
        normal(spec.num_key_heads, spec.key_size),
        key,
        normal(heads, spec.value_size),
        None if spec.decay == "constant" else log_decay,
        beta if spec.has_beta else None,
    )
