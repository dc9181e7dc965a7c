"""The tensors of a case of state layers: equal for all backends, over random states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlib.bench.state_case import StateCase
from attnlib.cache.states import StateCache
from attnlib.layer import StateLayer
from attnlib.layer.state_fused import separate_step
from attnlib.metadata import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.spec import StateSpec

__all__ = ["StateTokens", "draw_tokens", "draw_weight", "fill_slots", "set_positions", "step_batch"]


@dataclass(frozen=True, eq=False)
class StateTokens:
    """The new tokens of a batch.

    Attributes:
        rows: name -> `[T, ...]`: query, key, value, log_decay and beta of a recurrence, or x, a, b
            and z of a step from convolution to norm; None for what the layer has not.
        form: of such a step; None for a recurrence.
        separate: whether the step runs in separate launches.
    """

    rows: Mapping[str, Tensor | None]
    form: StepForm | None = None
    separate: bool = False

    def run(
        self, layer: StateLayer, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> None:
        """One call of a layer."""
        if self.form is None:
            given: tuple[Any, ...] = tuple(self.rows.values())
            layer(*given, cache, metadata, output=output)
            return
        x, a, b, z = self.rows.values()
        assert x is not None and a is not None  # every step has them
        if self.separate:
            separate_step(layer, FusedInputs(x, a, b, z, self.form), cache, metadata, output)
        else:
            layer.step(x, (a, b), z, self.form, cache, metadata, output=output)

    def chosen(self, index: Tensor, dtype: torch.dtype) -> StateTokens:
        """Some of the tokens, with gates in float32, as inputs of a layer of another dtype."""

        def taken(name: str, tensor: Tensor | None) -> Tensor | None:
            is_gate = name in ("log_decay", "beta", "a", "b")
            return None if tensor is None else tensor[index].to(torch.float32 if is_gate else dtype)

        return replace(self, rows={name: taken(name, x) for name, x in self.rows.items()})


def draw_weight(spec: StateSpec, draw: torch.Generator) -> Tensor | None:
    """The weights of the convolution, if the layer has one."""
    if not spec.has_convolution:
        return None
    shape = (spec.conv_channels, spec.conv_width)
    return torch.randn(shape, generator=draw, device=draw.device).to(spec.dtype)


def draw_tokens(case: StateCase, draw: torch.Generator) -> StateTokens:
    """The new tokens of a case. Those of a step have the gates and the norm of their model."""
    spec, tokens = case.spec, case.batch.num_tokens
    values, shapes = spec.num_heads * spec.value_size, spec.input_shapes(tokens)

    def normal(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
        return torch.randn(shape, generator=draw, device=draw.device).to(dtype)

    if not case.is_step:
        rows = {name: normal(*shapes[name]) for name in ("query", "key", "value")}
        rows["log_decay"] = -normal(*shapes["log_decay"], dtype=torch.float32).abs() / 8
        rows["beta"] = normal(*shapes["beta"], dtype=torch.float32).sigmoid()
        return StateTokens(rows)
    is_mamba2 = spec.update == "add"
    size = values // spec.num_key_heads if is_mamba2 else spec.value_size
    form = StepForm(
        order="vkq" if is_mamba2 else "qkv",
        gates="mamba2" if is_mamba2 else "softplus",
        rate=normal(spec.num_heads, dtype=torch.float32).exp(),
        bias=normal(*shapes["log_decay"][1:], dtype=torch.float32),
        norm_size=size,
        norm_weight=normal(values if is_mamba2 else size),
        output_gate="sigmoid" if spec.decay == "channel" else "silu",
        gate_first=is_mamba2,
    )
    given = {
        "x": normal(tokens, spec.conv_channels),
        "a": normal(*shapes["log_decay"]),
        "b": None if is_mamba2 else normal(*shapes["beta"]),
        "z": normal(tokens, values),
    }
    return StateTokens(given, form, case.work == "separate")


def fill_slots(cache: StateCache, draw: torch.Generator) -> None:
    """Give all slots a state, a tail and a window."""
    tensors = cache.tensors
    for field in (tensors.state, tensors.tail_key, tensors.tail_value, tensors.window):
        if field is not None:
            field.normal_(generator=draw)
    if tensors.tail_log_decay is not None:
        tensors.tail_log_decay.fill_(-0.1)
    if tensors.tail_beta is not None:
        tensors.tail_beta.fill_(0.5)


def set_positions(cache: StateCache, slots: slice, position: int) -> None:
    """Let a step continue from a position, up to which all tokens of some slots stay."""
    for positions in (cache.tensors.positions, cache.tensors.window_positions):
        if positions is not None:
            positions[slots] = position


def step_batch(
    case: StateCase, start: int, slots: range, device: torch.device
) -> CommonAttentionMetadata:
    """A batch of requests that continue from `start` tokens, one for each slot."""
    return CommonAttentionMetadata.from_lengths(
        [case.query_len] * len(slots),
        [start + case.query_len] * len(slots),
        device=device,
        state_slots=list(slots),
    )
