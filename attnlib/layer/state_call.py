"""Calls of a state layer: checks once per batch and call signature, then the backend's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnlib.backends.state_impl import StateInputs, StepPlan
from attnlib.cache.states import StateCache
from attnlib.instrumentation import ENVIRONMENT, STATE_OBSERVERS, VALIDATE_KEY
from attnlib.layer.state_checks import (
    check_batch,
    check_convolution,
    check_step,
    per_head_inputs,
    per_head_output,
)
from attnlib.layer.state_values import validate_convolution, validate_step
from attnlib.metadata.states import StateMetadata

if TYPE_CHECKING:
    from attnlib.layer.state import StateLayer

__all__ = ["call_convolution", "call_signature", "call_step", "keep_plan"]

MAX_PLANS = 64
"""Plans that one batch keeps; beyond it they are dropped and made again on demand."""


def call_step(
    layer: StateLayer, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, out: Tensor
) -> None:
    """`StateLayer.forward`."""
    check_batch(layer, cache, metadata, inputs)
    spec, heads, rows = layer.spec, per_head_inputs(layer, inputs), out
    if out.dim() == 2:
        rows = per_head_output(layer, out)
    signature = call_signature(layer, cache, (*heads, rows))
    run: Any = metadata.plans.get(signature)
    if run is None:
        check_step(layer, heads, rows, cache, metadata)
        run = layer.impl.plan_step(heads, cache, metadata, rows)
        keep_plan(metadata, signature, run)
    if VALIDATE_KEY in ENVIRONMENT:
        validate_step(spec, heads[3:], cache, metadata)
    finish = STATE_OBSERVERS and _observed(layer, "recurrence", heads, cache, metadata, rows)
    run(layer.impl, heads, cache, metadata, rows)
    for call in finish:
        call()


def call_convolution(
    layer: StateLayer, x: Tensor, cache: StateCache, metadata: StateMetadata, out: Tensor
) -> None:
    """`StateLayer.convolve`."""
    check_batch(layer, cache, metadata, (x,))
    signature = call_signature(layer, cache, (x, out))
    run: Any = metadata.plans.get(signature)
    if run is None:
        check_convolution(layer, x, out, cache, metadata)
        run = layer.impl.plan_convolution(x, cache, metadata, out)
        keep_plan(metadata, signature, run)
    if VALIDATE_KEY in ENVIRONMENT or layer.impl.checks_positions:
        validate_convolution(layer.impl, cache, metadata)
    finish = STATE_OBSERVERS and _observed(layer, "convolution", (x,), cache, metadata, out)
    run(layer.impl, x, cache, metadata, out)
    for call in finish:
        call()


def _observed(*call: Any) -> Sequence[Callable[[], None]]:
    """Tell observers of a call before it runs; returns what they want to be called after it."""
    return [after for after in (observe(*call) for observe in STATE_OBSERVERS) if after is not None]


def call_signature(
    layer: StateLayer, cache: StateCache, tensors: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Everything that checks and launches follow from, besides the batch and addresses."""
    own = (layer.conv_weight, layer.conv_bias, layer.skip)
    described = [  # `tensor_signature`, without a call for each tensor
        None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in (*tensors, *own)
    ]
    return (layer.impl.group, cache.signature, *described)


def keep_plan(metadata: StateMetadata, signature: tuple[Any, ...], run: StepPlan) -> None:
    if len(metadata.plans) >= MAX_PLANS:
        metadata.plans.clear()
    metadata.plans[signature] = run
