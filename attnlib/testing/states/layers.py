"""A state layer of a backend as a runner of served requests: the call sequence of an engine."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attnlib.cache.states import StateCache, state_layout
from attnlib.layer import StateLayer
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare, compare_bits
from attnlib.testing.states.inputs import LayerTensors, TokenInputs, draw_layer, draw_tokens
from attnlib.testing.states.oracle import convolve, recurrence
from attnlib.testing.states.serving import Results, Step

__all__ = [
    "LayerUnderTest",
    "compare_result_bits",
    "compare_results",
    "expected",
    "state_difference",
]


class LayerUnderTest:
    """A layer over slots that hold the remains of other requests, or NaN.

    Args:
        target: the backend and the device.
        spec: of the layer.
        num_slots: slots of its cache.
        scale: factor of q; None for the default.
        used: run another request in every slot first.
        gap: bytes between two slots, as in a pool of blocks.
    """

    def __init__(
        self,
        target: BackendUnderTest,
        spec: StateSpec,
        *,
        num_slots: int = 5,
        scale: float | None = None,
        used: bool = True,
        gap: int = 0,
    ) -> None:
        self.target, self.device = target, target.device
        self.tensors = draw_layer(spec, target.seed, scale)
        named = {name: value for name, value in vars(self.tensors).items() if name != "scale"}
        moved = {name: None if x is None else x.to(self.device) for name, x in named.items()}
        self.layer = StateLayer(
            spec, backend=target.backend, scale=scale, prefix="verify", device=self.device, **moved
        )
        self.spec = self.layer.spec
        size = state_layout(self.spec).bytes_per_slot + gap
        # Bytes of 255 are NaN in every dtype of a slot, and the position -1.
        self.memory = torch.full((num_slots, size), 255, dtype=torch.uint8, device=self.device)
        self.cache = StateCache(self.spec, self.memory)
        self.builder: Any = target.backend.make_builder(self.spec, self.device)
        for slot in range(num_slots if used else 0):
            count = 5 + slot
            self.run(draw_tokens(spec, count, 400 + slot), Step([count], [count], [slot]))

    def metadata(self, step: Step) -> StateMetadata:
        """The metadata of a batch."""
        built: StateMetadata = self.builder.build(0, self.common(step))
        return built

    def common(self, step: Step) -> CommonAttentionMetadata:
        """A batch; its slots are not checked, so that a layer has to."""
        return CommonAttentionMetadata.from_lengths(
            step.query_lens,
            step.seq_lens,
            device=self.device,
            state_slots=torch.tensor(step.slots, dtype=torch.int32),
            state_sources=None
            if step.sources is None
            else torch.tensor(step.sources, dtype=torch.int32),
        )

    def run(self, inputs: TokenInputs, step: Step) -> Results:
        """One step; the outputs are on the CPU."""
        metadata = self.metadata(step)
        results = self.call_on_device(inputs.each(lambda x: x.to(self.device)), metadata)
        return Results(*(None if x is None else x.cpu() for x in results))

    def call_on_device(self, inputs: TokenInputs, metadata: StateMetadata) -> Results:
        """Both operations of the layer, with outputs that hold NaN before."""
        convolved = out = None
        if inputs.x is not None:
            convolved = torch.full_like(inputs.x, torch.nan, memory_format=torch.contiguous_format)
            self.layer.convolve(inputs.x, self.cache, metadata, output=convolved)
        query, key, value = inputs.query, inputs.key, inputs.value
        if query is not None and key is not None and value is not None:
            out = torch.full_like(value, torch.nan, memory_format=torch.contiguous_format)
            gates = inputs.log_decay, inputs.beta
            self.layer(query, key, value, *gates, self.cache, metadata, output=out)
        return Results(convolved, out)


def expected(spec: StateSpec, layer: LayerTensors, inputs: TokenInputs) -> tuple[Results, Results]:
    """What the rules give for a request from its first token on: in float64, and token by token in
    float32 with the roundings that T3, T4 and T6 allow."""
    exact, rounded = (_computed(spec, layer, inputs, dtype) for dtype in (None, spec.dtype))
    return exact, rounded


def _computed(
    spec: StateSpec, layer: LayerTensors, inputs: TokenInputs, rounding: torch.dtype | None
) -> Results:
    wide = torch.float64 if rounding in (None, torch.float64) else torch.float32
    convolved = out = None
    if inputs.x is not None and layer.conv_weight is not None:
        convolved = convolve(spec, inputs.x, layer.conv_weight, layer.conv_bias, dtype=wide)
    if inputs.query is not None and inputs.key is not None and inputs.value is not None:
        decay = inputs.log_decay if layer.log_decay is None else layer.log_decay
        assert decay is not None  # of the layer or of the tokens
        out, _ = recurrence(
            spec,
            inputs.query,
            inputs.key,
            inputs.value,
            decay,
            inputs.beta,
            scale=layer.scale,
            skip=layer.skip,
            dtype=wide,
            rounded_norm=rounding,
        )
    if rounding is None:
        return Results(convolved, out)
    return Results(*(None if x is None else x.to(rounding) for x in (convolved, out)))


def compare_results(
    spec: StateSpec,
    got: Results,
    wanted: tuple[Results, Results],
    what: str,
    rows: slice | None = None,
) -> str:
    """The first difference beyond its budget from what `expected` returns, or from some rows of it,
    or ""."""
    if rows is not None:
        wanted = part_of(wanted[0], rows), part_of(wanted[1], rows)
    names = ("convolution", "recurrence")
    for name, actual, exact, rounded in zip(names, got, *wanted, strict=True):
        if actual is None or exact is None or rounded is None:
            continue
        found = compare(actual, exact, rounded, spec.dtype)
        if not found.passed:
            return f"{what}: {name}: {found}"
    return ""


def compare_result_bits(got: Results, wanted: Results, what: str) -> str:
    """The first element with other bits, or ""."""
    names = ("convolution", "recurrence")
    for name, actual, other in zip(names, got, wanted, strict=True):
        if actual is None or other is None:
            continue
        found = compare_bits(actual, other)
        if not found.passed:
            return f"{what}: {name}: {found}"
    return ""


def state_difference(spec: StateSpec, state: Tensor, exact: Tensor) -> str:
    """How a canonical state or window differs from the exact one, or "". A transposed state is
    named. Operands of products may have been rounded to the dtype of the layer, as the norms of T4;
    windows must be equal.
    """
    exact = exact.double()
    size = exact.nan_to_num(0.0).abs().max()
    rounding = 16 * torch.finfo(spec.state_dtype).eps + torch.finfo(spec.dtype).eps + 1e-5
    limit = rounding * size if state.dim() == 3 else 0.0
    error = _largest_error(state, exact)
    if bool(error <= limit):
        return ""
    square = state.dim() == 3 and state.shape[1] == state.shape[2]
    if square and bool(_largest_error(state.mT, exact) <= limit):
        return "is transposed: it must be [Hv, Dv, Dk] (T20)"
    return f"differs by {float(error / size):.2g} of its largest element"


def _largest_error(got: Tensor, exact: Tensor) -> Tensor:
    """NaN where only one is NaN."""
    difference = (got.double() - exact).abs()
    return difference.masked_fill(got.isnan() & exact.isnan(), 0.0).max()


def part_of(results: Results, rows: slice) -> Results:
    """Some rows of the results."""
    return Results(*(None if x is None else x[rows] for x in results))


@functools.lru_cache(maxsize=64)  # cases share requests
def drawn(spec: StateSpec, count: int, seed: int) -> TokenInputs:
    """`draw_tokens`, remembered."""
    return draw_tokens(spec, count, seed)


def to_cpu(tensor: Tensor) -> Tensor:
    """A copy on the host."""
    return tensor.detach().cpu().clone()
