"""State layers under torch.compile: two opaque operators, as `attnlib.layer.operator` has for
attention. The id of the cache stands for the slots, which the compiler does not see written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.compile.objects import lookup
from attnlib.layer.checks import refuse_gradients
from attnlib.layer.state_call import call_convolution, call_step
from attnlib.metadata.states import StateMetadata

if TYPE_CHECKING:
    from attnlib.layer.state import StateLayer

__all__ = ["convolve_opaquely", "short_convolution", "state_step", "step_opaquely"]


@torch.library.custom_op("attnlib::state_step", mutates_args=("out", "cache"))
def state_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    out: torch.Tensor,
    layer: int,
    cache: torch.Tensor,
    metadata: torch.Tensor,
) -> None:
    """`StateLayer.forward` of one layer.

    Args:
        query, key, value, log_decay, beta: of the call.
        out: like `value`, written.
        layer, cache, metadata: ids.

    Raises:
        ContractError: as the method, or the object of an id no longer exists.
    """
    inputs = StateInputs(query, key, value, cast(torch.Tensor, log_decay), beta)
    call_step(_layer(layer), inputs, *_objects(cache, metadata), out)


@torch.library.custom_op("attnlib::short_convolution", mutates_args=("out", "cache"))
def short_convolution(
    x: torch.Tensor, out: torch.Tensor, layer: int, cache: torch.Tensor, metadata: torch.Tensor
) -> None:
    """`StateLayer.convolve` of one layer.

    Args:
        x: of the call.
        out: like `x`, written.
        layer, cache, metadata: ids.

    Raises:
        ContractError: as the method, or the object of an id no longer exists.
    """
    call_convolution(_layer(layer), x, *_objects(cache, metadata), out)


def _writes_nothing(*arguments: object) -> None:
    """The operators for the compiler: what they return has no shape."""


state_step.register_fake(_writes_nothing)
short_convolution.register_fake(_writes_nothing)


def _layer(handle: int) -> StateLayer:
    module: Any = lookup(handle, torch.nn.Module, "layer")
    return cast("StateLayer", module)


def _objects(cache: torch.Tensor, metadata: torch.Tensor) -> tuple[StateCache, StateMetadata]:
    return lookup(cache, StateCache, "cache"), lookup(metadata, StateMetadata, "metadata")


def step_opaquely(
    layer: StateLayer,
    inputs: StateInputs,
    cache: StateCache,
    metadata: StateMetadata,
    output: torch.Tensor | None,
) -> torch.Tensor:
    """`StateLayer.forward` while torch.compile traces it: one call of the operator."""
    if torch.is_grad_enabled():
        refuse_gradients(*inputs)
    value = inputs.value
    if output is None:
        output = torch.empty(value.shape, dtype=layer.spec.dtype, device=value.device)
    state_step(*inputs, output, layer.handle, cache.handle, metadata.handle)
    return output


def convolve_opaquely(
    layer: StateLayer,
    x: torch.Tensor,
    cache: StateCache,
    metadata: StateMetadata,
    output: torch.Tensor | None,
) -> torch.Tensor:
    """`StateLayer.convolve` while torch.compile traces it."""
    if torch.is_grad_enabled():
        refuse_gradients(x)
    if output is None:
        output = torch.empty(x.shape, dtype=layer.spec.dtype, device=x.device)
    short_convolution(x, output, layer.handle, cache.handle, metadata.handle)
    return output
