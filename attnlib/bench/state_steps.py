"""Decodes from convolution to norm in the suite `states`: one launch beside separate ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlib.cache.states import StateCache
from attnlib.layer import StateLayer
from attnlib.layer.state_fused import separate_step
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.spec import StateSpec

__all__ = ["step_call", "step_fields", "surrounding_bytes"]


def step_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a spec with the convolution before its recurrence."""
    keys = fields.get("num_key_heads", fields["num_heads"]) * fields["key_size"]
    channels = 2 * keys + fields["num_heads"] * fields["value_size"]
    return {**fields, "conv_channels": channels, "conv_width": 4}


def surrounding_bytes(spec: StateSpec, query_len: int) -> int:
    """Bytes that a step of one request must move besides those of its recurrence: the window is
    read and written, and the output gate is read."""
    window = spec.conv_channels * (spec.conv_width - 1 + query_len)
    return spec.dtype.itemsize * (window + query_len * spec.num_heads * spec.value_size)


def step_call(
    layer: StateLayer,
    cache: StateCache,
    batches: Sequence[StateMetadata],
    tokens: int,
    *,
    separate: bool,
) -> Callable[[int], object]:
    """A function that runs the step of one of the batches, with the gates and the norm of its
    model, in one launch or in separate ones."""
    spec, device = layer.spec, cache.device
    heads, values = spec.num_heads, spec.num_heads * spec.value_size

    def normal(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    is_mamba2 = spec.update == "add"
    gates = "mamba2" if is_mamba2 else "softplus"
    size = values // spec.num_key_heads if is_mamba2 else spec.value_size
    decays = (heads, spec.key_size) if spec.decay == "channel" else (heads,)
    form = StepForm(
        order="vkq" if is_mamba2 else "qkv",
        gates=gates,
        rate=normal(heads, dtype=torch.float32).exp(),
        bias=normal(*decays, dtype=torch.float32),
        norm_size=size,
        norm_weight=normal(values if is_mamba2 else size),
        output_gate="sigmoid" if spec.decay == "channel" else "silu",
        gate_first=is_mamba2,
    )
    x, z, output = (
        normal(tokens, spec.conv_channels),
        normal(tokens, values),
        normal(tokens, values),
    )
    a, b = normal(tokens, *decays), None if is_mamba2 else normal(tokens, heads)
    inputs = FusedInputs(x, a, b, z, form)

    def call(copy: int) -> object:
        if separate:
            separate_step(layer, inputs, cache, batches[copy], output)
            return output
        return layer.step(x, (a, b), z, form, cache, batches[copy], output=output)

    return call
