"""`StateLayer.step`: convolution, gates, recurrence and norm, in one launch or in separate ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlib.backends.state_impl import StateImpl
from attnlib.cache.states import StateCache
from attnlib.errors import ContractError
from attnlib.instrumentation import ENVIRONMENT, STATE_OBSERVERS, VALIDATE_KEY
from attnlib.layer.state_call import call_signature, keep_plan
from attnlib.layer.state_checks import check_batch, check_tensors, per_head_output, taps_of
from attnlib.layer.state_values import validate_convolution, validate_step
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.spec import StateSpec

if TYPE_CHECKING:
    from attnlib.layer.state import StateLayer

__all__ = ["call_fused_step", "separate_step"]


def call_fused_step(
    layer: StateLayer, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata, out: Tensor
) -> None:
    """`StateLayer.step`."""
    *tensors, form = inputs
    check_batch(layer, cache, metadata, tensors)
    described = (*tensors, form.rate, form.bias, form.norm_weight, out)
    signature = (form.scalars, *call_signature(layer, cache, described))
    run: Any = metadata.plans.get(signature)
    rows = per_head_output(layer, out)
    if run is None:
        _check_form(layer.spec, inputs.form)
        _check_inputs(layer, inputs, out, cache, metadata)
        run = layer.impl.plan_fused_step(inputs, cache, metadata, rows) or _separately
        keep_plan(metadata, signature, run)
    if run is _separately or STATE_OBSERVERS:
        separate_step(layer, inputs, cache, metadata, out)
        return
    if VALIDATE_KEY in ENVIRONMENT:
        validate_convolution(layer.impl, cache, metadata)
        if form.gates == "given":
            validate_step(layer.spec, (inputs.a, inputs.b), cache, metadata)
    run(layer.impl, inputs, cache, metadata, rows)


def separate_step(
    layer: StateLayer, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata, out: Tensor
) -> None:
    """The step in separate launches. Arguments as of `call_fused_step`, checked."""
    spec, (x, decay, beta, z, form) = layer.spec, inputs
    # torch.compile traces and fuses the operations of torch.
    parts = StateImpl if torch.compiler.is_compiling() else layer.impl
    if form.gates != "given":
        decay, beta = parts.state_gates(decay, beta, form)
    if parts is layer.impl and VALIDATE_KEY in ENVIRONMENT:  # before the windows change
        validate_step(spec, (decay, beta), cache, metadata)
    convolved, sizes = layer.convolve(x, cache, metadata), _channels(spec)
    split = torch.split(convolved, [sizes[name] for name in form.order], 1)
    found: dict[str, Tensor] = dict(zip(form.order, split, strict=True))
    layer(found["q"], found["k"], found["v"], decay, beta, cache, metadata, output=out)
    if form.norm_size:
        parts.gated_norm(per_head_output(layer, out), z, form)


def _check_form(spec: StateSpec, form: StepForm) -> None:
    """Whether a form is one of the layer.

    Raises:
        ContractError: names the field.
    """
    heads, bias = (spec.num_heads,), spec.input_shapes(0)["log_decay"]
    values, channels = spec.num_heads * spec.value_size, sum(_channels(spec).values())
    if channels != spec.conv_channels or not spec.has_recurrence:
        raise ContractError(
            f"step of a layer with num_heads={spec.num_heads} and conv_channels="
            f"{spec.conv_channels}: it needs both, and a channel per element of q, k and v "
            f"({channels}); call convolve and the layer",
            rule="T6",
        )
    is_mamba2 = form.gates == "mamba2"
    decays = ("head", "constant") if form.gates == "given" else ("head",)
    if spec.decay not in (decays if is_mamba2 else (*decays, "channel")):
        raise ContractError(f"gates={form.gates!r} with decay={spec.decay!r}: pass them as given")
    if is_mamba2 and not spec.has_beta:
        raise ContractError("gates='mamba2' with has_beta=False: its step size is a beta")
    if form.norm_size and (form.norm_size % spec.value_size or values % form.norm_size):
        raise ContractError(
            f"norm_size={form.norm_size} must be a multiple of value_size={spec.value_size} that "
            f"divides the {values} values of a token"
        )
    for name, tensor, allowed, dtype in (
        ("rate", form.rate, [heads], torch.float32),
        ("bias", form.bias, [bias[1:] or heads], torch.float32),
        ("norm_weight", form.norm_weight, [(form.norm_size,), (values,)], None),
    ):
        if tensor is not None and (
            tuple(tensor.shape) not in allowed
            or not tensor.is_contiguous()
            or tensor.dtype != (dtype or tensor.dtype)
        ):
            raise ContractError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; "
                f"it must be {dtype or 'of any dtype'}, dense, of shape {list(allowed[0])}"
            )


def _check_inputs(
    layer: StateLayer, inputs: FusedInputs, out: Tensor, cache: StateCache, batch: StateMetadata
) -> None:
    spec, (x, a, b, z, form) = layer.spec, inputs
    rows, shapes = x.shape[0], spec.input_shapes(x.shape[0])
    for name, tensor, needed in (
        ("gates[0]", a, True),
        ("gates[1]", b, spec.has_beta and form.gates != "mamba2"),
        ("z", z, form.output_gate is not None),
    ):
        if needed is (tensor is None):
            action = "pass it" if needed else "pass None"
            raise ContractError(f"{name} is {'missing' if needed else 'given'}: {action}")
    raw, values = form.gates != "given", (rows, spec.num_heads * spec.value_size)

    def kind(gate: Tensor | None) -> torch.dtype:
        return spec.dtype if raw and gate is not None and gate.itemsize < 4 else torch.float32

    wanted = {
        "x": (x, spec.dtype, (rows, spec.conv_channels)),
        "gates[0]": (a, kind(a), shapes["log_decay"]),
        "gates[1]": (b, kind(b), shapes["beta"]),
        "z": (z, spec.dtype, values),
        "output": (out, spec.dtype, values),
        **taps_of(layer),
        "skip": (layer.skip, torch.float32, (spec.num_heads,)),
        "rate": (form.rate, torch.float32, (spec.num_heads,)),
    }
    check_tensors(wanted, cache, batch, rows, "T5")
    for name in ("x", "gates[0]", "gates[1]", "z", "output"):
        tensor = wanted[name][0]
        if tensor is not None and rows and not tensor[0].is_contiguous():
            raise ContractError(
                f"{name} has strides {tensor.stride()}; its rows must be dense: call .contiguous()"
            )


def _channels(spec: StateSpec) -> dict[str, int]:
    keys = spec.num_key_heads * spec.key_size
    return {"q": keys, "k": keys, "v": spec.num_heads * spec.value_size}


def _separately(*call: Any) -> None:
    """Stands for `separate_step`."""
