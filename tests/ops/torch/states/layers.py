"""The operations on states as a runner of served requests."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import torch

from attnlib.ops.states import (
    RecurrenceParams,
    StateBatch,
    StateInputs,
    StateLayout,
    StateTensors,
    Taps,
)
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import LayerTensors, TokenInputs
from attnlib.testing.states.oracle import convolve, recurrence
from attnlib.testing.states.serving import Results, Step


def layout_of(spec: StateSpec, form: str) -> StateLayout:
    names = (
        "num_heads", "num_key_heads", "key_size", "value_size", "decay", "has_beta",
        "conv_channels", "conv_width", "dtype", "state_dtype", "max_rollback",
    )  # fmt: skip
    given = {name: getattr(spec, name) for name in names}
    return StateLayout(form=form, chunk_size=spec.chunk_size or 16, **given)


def batch_of(step: Step) -> StateBatch:
    starts = torch.zeros(len(step.query_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(step.query_lens, dtype=torch.int32).cumsum(0)
    sources = None if step.sources is None else torch.tensor(step.sources, dtype=torch.int32)
    return StateBatch(
        query_start_loc=starts,
        seq_lens=torch.tensor(step.seq_lens, dtype=torch.int32),
        slots=torch.tensor(step.slots, dtype=torch.int32),
        sources=sources,
        max_query_len=max(step.query_lens, default=0),
    )


def moved(item: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on a device."""
    tensors = {key: x.to(device) for key, x in vars(item).items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(item, **tensors)


class Operations:
    """Slots full of NaN, and the operations of `ops.torch` or `ops.triton` over them."""

    def __init__(
        self, spec: StateSpec, layer: LayerTensors, form: str, num_slots: int = 8,
        package: str = "torch", device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.spec, self.device = spec, torch.device(device)
        self.layer = moved(layer, self.device)
        names = ("short_convolution", "state_step")
        self.short_convolution, self.state_step = (
            getattr(import_module(f"attnlib.ops.{package}.states.{name}"), name) for name in names
        )
        layout = layout_of(spec, form)
        size = (num_slots, layout.bytes_per_slot)
        self.memory = torch.full(size, 255, dtype=torch.uint8, device=self.device)
        self.slots = StateTensors.from_bytes(layout, self.memory)

    def run(self, inputs: TokenInputs, step: Step) -> Results:
        layer, batch = self.layer, moved(batch_of(step), self.device)
        inputs = moved(inputs, self.device)
        convolved = out = None
        if inputs.x is not None:
            convolved = torch.full_like(inputs.x, 3)
            taps = Taps(layer.conv_weight, layer.conv_bias, self.spec.conv_activation)
            self.short_convolution(inputs.x, taps, self.slots, batch, out=convolved)
        if inputs.value is not None:
            out = torch.full_like(inputs.value, 3)
            params = RecurrenceParams(
                scale=layer.scale, update=self.spec.update, qk_norm=self.spec.qk_norm,
                skip=layer.skip, is_invariant=self.spec.batch_invariant,
            )  # fmt: skip
            decay = inputs.log_decay if layer.log_decay is None else layer.log_decay
            given = StateInputs(inputs.query, inputs.key, inputs.value, decay, inputs.beta)
            self.state_step(given, self.slots, batch, params, out=out)
        return Results(*(None if x is None else x.cpu() for x in (convolved, out)))


def wanted(spec: StateSpec, layer: LayerTensors, inputs: TokenInputs) -> Results:
    """What the rules say, in float64."""
    convolved = out = None
    if inputs.x is not None:
        convolved = convolve(spec, inputs.x, layer.conv_weight, layer.conv_bias)
    if inputs.value is not None:
        decay = inputs.log_decay if layer.log_decay is None else layer.log_decay
        out, _ = recurrence(
            spec, inputs.query, inputs.key, inputs.value, decay, inputs.beta,
            scale=layer.scale, skip=layer.skip,
        )  # fmt: skip
    return Results(convolved, out)


def forgetting(inputs: TokenInputs, every: int) -> TokenInputs:
    """The same tokens, of which some forget all before them: their log decays have no sum in
    float32, with -inf among them."""
    assert inputs.log_decay is not None
    decay = inputs.log_decay.clone()
    decay[::every] = torch.finfo(torch.float32).min
    decay[every :: 3 * every] = -torch.inf
    return dataclasses.replace(inputs, log_decay=decay)


def largest_error(got: Results, expected: Results) -> float:
    """Largest difference, relative to the largest value; NaN where there is one."""
    errors = [
        (a.double() - b).abs().max() / b.abs().max()
        for a, b in zip(got, expected, strict=True)
        if a is not None and b is not None and b.numel()
    ]
    return torch.stack(errors).max().item()  # of floats, Python's max may leave NaN out
