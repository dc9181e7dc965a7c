"""Checks of state layers: their tensors, and those of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnlib.backends.state_impl import StateInputs
from attnlib.cache.overlap import check_written, tensors_overlap
from attnlib.cache.states import StateCache
from attnlib.errors import ContractError
from attnlib.layer.checks import refuse_gradients
from attnlib.layer.tensor_checks import refuse_negated
from attnlib.metadata.states import StateMetadata
from attnlib.ops.addresses import check_starts
from attnlib.ops.states.checks import check_slots
from attnlib.spec import StateSpec

if TYPE_CHECKING:
    from attnlib.layer.state import StateLayer

__all__ = [
    "check_batch",
    "check_convolution",
    "check_layer_tensors",
    "check_step",
    "check_tensors",
    "per_head_inputs",
    "per_head_output",
    "taps_of",
]

Wanted = tuple[Tensor | None, torch.dtype, tuple[int, ...]]
"""A tensor of a call, and the dtype and shape that it must have; None is not checked."""


def check_layer_tensors(spec: StateSpec, tensors: Mapping[str, Tensor | None]) -> None:
    """Whether a layer has the tensors that its spec declares, and no others.

    Raises:
        ContractError: names the tensor.
    """
    heads, channels = (spec.num_heads,), (spec.conv_channels,)
    has_decay = spec.has_recurrence and spec.decay == "constant"
    weight = (*channels, spec.conv_width)
    for name, field, needed, shape, dtype, rule in (
        ("conv_weight", "conv_channels", spec.has_convolution, weight, spec.dtype, "T6"),
        ("conv_bias", "has_conv_bias", spec.has_conv_bias, channels, spec.dtype, "T6"),
        ("skip", "has_skip", spec.has_skip, heads, torch.float32, "T2"),
        ("log_decay", "decay", has_decay, heads, torch.float32, "T5"),
    ):
        tensor = tensors[name]
        if needed is not (tensor is not None):
            action = "pass it" if needed else "leave it out"
            given, value = "missing" if needed else "given", getattr(spec, field)
            raise ContractError(
                f"{name} is {given}, and the spec has {field}={value!r}: {action}", rule=rule
            )
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
            raise _wrong(name, tensor, dtype, shape, rule)


def _wrong(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], rule: str
) -> ContractError:
    found = f"{tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}"
    return ContractError(f"{name} is {found.replace('torch.', '')}", rule=rule)


def check_batch(
    layer: StateLayer, cache: StateCache, metadata: StateMetadata, inputs: Iterable[Tensor | None]
) -> None:
    """Whether cache and metadata are of this kind of layer, and no gradient is recorded.

    Raises:
        ContractError: another type or layout, slots outside of the cache (on a CPU), or a gradient.
    """
    if not isinstance(metadata, StateMetadata):
        raise ContractError(
            f"metadata is a {type(metadata).__name__}; a state layer needs the StateMetadata that "
            "layer.backend.make_builder(layer.spec, device).build(0, common_attn_metadata) makes"
        )
    if not isinstance(cache, StateCache):
        raise ContractError(
            f"cache is a {type(cache).__name__}; a state layer needs an attnlib.StateCache: "
            "StateCache.allocate(layer.spec, num_slots)"
        )
    if cache.layout is not layer.layout and cache.layout != layer.layout:
        raise ContractError(
            f"{cache!r} was allocated for {cache.spec}, and layer "
            f"{layer.prefix or '(unnamed)'} has {layer.spec}: "
            "use StateCache.allocate(layer.spec, num_slots)",
            rule="T9",
        )
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        refuse_gradients(*inputs)
    if metadata.state_slots.is_cpu:
        check_requests(metadata, cache)


def check_requests(metadata: StateMetadata, cache: StateCache) -> None:
    """Starts and slots of a batch on a CPU, in every call: they may have changed in place, and
    batches over other slots share plans. Values that passed before are only compared."""
    batch, derived = metadata.batch, metadata.derived
    bounds = metadata.num_actual_tokens, metadata.max_query_len
    tensors = batch.query_start_loc, batch.seq_lens, batch.slots, batch.sources
    found = [*(x if x is None else x.tolist() for x in tensors), cache.tensors.valid, bounds]
    if derived.get("checked requests") != found:
        check_starts("query_start_loc", batch.query_start_loc, *bounds)
        check_slots(list(batch.requests()), cache.tensors.valid)
        derived["checked requests"] = found


def per_head_output(layer: StateLayer, output: Tensor) -> Tensor:
    """A view `[T, Hv, Dv]` of a flat output.

    Raises:
        ContractError: another shape.
    """
    heads, size = layer.spec.num_heads, layer.spec.value_size
    if output.dim() != 2 or output.shape[1] != heads * size:
        wanted = f"it must be [tokens, {heads * size}]"
        raise ContractError(f"output has shape {tuple(output.shape)}; {wanted}", rule="T2")
    return output.view(output.shape[0], heads, size)


def per_head_inputs(layer: StateLayer, inputs: StateInputs) -> StateInputs:
    """The inputs with `[T, heads, size]` views of query, key and value.

    Raises:
        ContractError: a layer without a recurrence, or a flat tensor of another width.
    """
    spec = layer.spec
    if not spec.num_heads:
        raise ContractError(
            f"layer {layer.prefix or '(unnamed)'} has num_heads=0, a convolution only: call "
            "layer.convolve"
        )
    keys, values = (spec.num_key_heads, spec.key_size), (spec.num_heads, spec.value_size)
    views, names = [], ("query", "key", "value")
    for name, tensor, (heads, size) in zip(names, inputs[:3], (keys, keys, values), strict=True):
        if tensor.dim() == 2 and tensor.shape[1] == heads * size:
            tensor = tensor.view(tensor.shape[0], heads, size)
        if tensor.dim() != 3 or tensor.shape[1:] != (heads, size):
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, {heads}, {size}] or "
                f"[tokens, {heads * size}]",
                rule="T2",
            )
        views.append(tensor)
    query, key, value = views
    return StateInputs(query, key, value, inputs.log_decay, inputs.beta)


def check_step(
    layer: StateLayer, inputs: StateInputs, output: Tensor, cache: StateCache, batch: StateMetadata
) -> None:
    """Dtypes, shapes and devices of a call of the recurrence.

    Raises:
        ContractError: names the tensor, what it is and what it must be.
    """
    spec, beta, rows = layer.spec, inputs.beta, inputs.value.shape[0]
    if inputs.log_decay is None:
        raise ContractError(
            f"log_decay=None, and decay={spec.decay!r} has one per token: pass it", rule="T5"
        )
    if (beta is None) is spec.has_beta:
        action = "pass it" if spec.has_beta else "leave it None"
        raise ContractError(
            f"beta is {'missing' if beta is None else 'given'}, and the spec has "
            f"has_beta={spec.has_beta}: {action}",
            rule="T5",
        )
    shapes = spec.input_shapes(rows)
    wanted: dict[str, Wanted] = {
        name: (x, torch.float32 if name in ("log_decay", "beta") else spec.dtype, shapes[name])
        for name, x in inputs._asdict().items()
    }
    wanted["output"] = (output, spec.dtype, shapes["value"])
    wanted["skip"] = (layer.skip, torch.float32, (spec.num_heads,))
    check_tensors(wanted, cache, batch, rows, "T5")


def check_convolution(
    layer: StateLayer, x: Tensor, output: Tensor, cache: StateCache, batch: StateMetadata
) -> None:
    """Dtypes, shapes and devices of a call of the convolution.

    Raises:
        ContractError: names the tensor, what it is and what it must be.
    """
    spec = layer.spec
    if not spec.has_convolution:
        name = layer.prefix or "(unnamed)"
        raise ContractError(f"layer {name} has conv_channels=0: it has no convolution", rule="T6")
    shape = (*x.shape[:1], spec.conv_channels)
    wanted = {"x": (x, spec.dtype, shape), "output": (output, spec.dtype, shape)}
    check_tensors({**wanted, **taps_of(layer)}, cache, batch, shape[0], "T6")


def taps_of(layer: StateLayer) -> dict[str, Wanted]:
    """The tensors of a layer's convolution, for `check_tensors`."""
    spec = layer.spec
    return {
        "conv_weight": (layer.conv_weight, spec.dtype, (spec.conv_channels, spec.conv_width)),
        "conv_bias": (layer.conv_bias, spec.dtype, (spec.conv_channels,)),
    }


def check_tensors(
    wanted: Mapping[str, Wanted], cache: StateCache, batch: StateMetadata, rows: int, rule: str
) -> None:
    """Whether the tensors of a call with so many rows fit the slots and the batch.

    Raises:
        ContractError: names what does not.
    """
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != shape:
            raise _wrong(name, tensor, dtype, shape, rule)
        if name == "output":
            check_written("T3", output=tensor)
            if tensors_overlap(tensor, cache.memory):
                raise ContractError(
                    "output is in the memory of the slots: pass another tensor, or None", rule="T14"
                )
        if tensor.is_neg():
            refuse_negated(name, tensor)
        if tensor.device != cache.device:
            raise ContractError(
                f"{name} is on {tensor.device}, and the slots are on {cache.device}: move one"
            )
    if batch.state_slots.device != cache.device:
        raise ContractError(
            f"the batch is on {batch.state_slots.device}, and the slots are on {cache.device}: "
            "build the batch for the device of the cache"
        )
    if rows < batch.num_actual_tokens:
        raise ContractError(
            f"the call has {rows} rows, and the batch has {batch.num_actual_tokens} tokens: "
            "pass a row per token",
            rule="T1",
        )
