"""State layers under torch.compile: two opaque operators, as `attnlib.layer.operator` has for
attention. The id of the cache stands for the slots, which the compiler does not see written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.compile.objects import lookup
from attnlib.layer.checks import refuse_gradients
from attnlib.layer.state_call import call_convolution, call_step
from attnlib.layer.tensor_checks import refuse_in_place
from attnlib.metadata.states import StateMetadata

if TYPE_CHECKING:
    from attnlib.layer.state import StateLayer

__all__ = ["convolve_opaquely", "short_convolution", "state_step", "step_opaquely"]


@torch.library.custom_op("attnlib::state_step", mutates_args=("out", "cache"))
def state_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    out: Tensor,
    layer: int,
    cache: Tensor,
    metadata: Tensor,
) -> None:
    """`StateLayer.forward` of one layer: arguments as there; `out` is written.

    Raises:
        ContractError: as the method, or the object of an id no longer exists.
    """
    inputs = StateInputs(query, key, value, cast(Tensor, log_decay), beta)
    refuse_in_place(out, **inputs._asdict())
    call_step(_layer(layer), inputs, *_objects(cache, metadata), out)


@torch.library.custom_op("attnlib::short_convolution", mutates_args=("out", "cache"))
def short_convolution(x: Tensor, out: Tensor, layer: int, cache: Tensor, metadata: Tensor) -> None:
    """`StateLayer.convolve` of one layer, likewise."""
    refuse_in_place(out, x=x)
    call_convolution(_layer(layer), x, *_objects(cache, metadata), out)


for _operator in (state_step, short_convolution):
    _operator.register_fake(lambda *arguments: None)  # what they return has no shape


def _layer(handle: int) -> StateLayer:
    module: Any = lookup(handle, torch.nn.Module, "layer")
    return cast("StateLayer", module)


def _objects(cache: Tensor, metadata: Tensor) -> tuple[StateCache, StateMetadata]:
    return lookup(cache, StateCache, "cache"), lookup(metadata, StateMetadata, "metadata")


def step_opaquely(
    layer: StateLayer, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, out: Tensor
) -> None:
    """`StateLayer.forward` while torch.compile traces it: one call of the operator."""
    refuse_gradients(*inputs)
    state_step(*inputs, out, layer.handle, cache.handle, metadata.handle)


def convolve_opaquely(
    layer: StateLayer, x: Tensor, cache: StateCache, metadata: StateMetadata, out: Tensor
) -> None:
    """`StateLayer.convolve` while torch.compile traces it."""
    refuse_gradients(x)
    short_convolution(x, out, layer.handle, cache.handle, metadata.handle)
