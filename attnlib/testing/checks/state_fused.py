"""ST15, ST17: `StateLayer.step`: convolution, gates, recurrence and norm, values and bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlib.layer.state_fused import separate_step
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.states.cases import ROLLBACK, Body, over_kinds
from attnlib.testing.states.inputs import LayerTensors
from attnlib.testing.states.layers import LayerUnderTest
from attnlib.testing.states.oracle import convolve, recurrence
from attnlib.testing.states.serving import Step

__all__ = ["CHECKS", "drawn_step", "expected_step"]


def drawn_step(spec: StateSpec, count: int, seed: int) -> FusedInputs:
    """Tokens of a request, and the form of the models of a kind."""
    generator = torch.Generator().manual_seed(seed + 15)

    def normal(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    heads, size, wide = spec.num_heads, spec.value_size, torch.float32
    decays = (heads, spec.key_size) if spec.decay == "channel" else (heads,)
    form = StepForm(
        gates="softplus",
        rate=normal(heads, dtype=wide).exp(),
        bias=normal(*decays, dtype=wide),
        beta_factor=2.0,
        norm_size=size,
        norm_weight=normal(size),
        output_gate="silu",
    )
    if spec.decay == "channel":
        form = replace(form, gates="bounded", bounds=(-5.0, 0.0), output_gate="sigmoid")
    elif spec.update == "add":
        weight = normal(heads * size)
        form = replace(form, order="vkq", gates="mamba2", bounds=(0.05, 0.8), gate_first=True)
        form = replace(form, norm_size=2 * size, norm_weight=weight)
    b = None if form.gates == "mamba2" else normal(count, heads)
    x, z = normal(count, spec.conv_channels), normal(count, heads * size)
    return FusedInputs(x, normal(count, *decays) - 1, b, z, form)


def expected_step(
    spec: StateSpec, own: LayerTensors, inputs: FusedInputs, rounding: torch.dtype | None
) -> Tensor:
    """What the rules give in float64; with `rounding`, in float32 and rounded where outputs are."""
    x, a, b, z, form = inputs
    dtype = torch.float64 if rounding is None else torch.float32
    assert form.rate is not None and form.bias is not None and form.norm_weight is not None
    assert z is not None and own.conv_weight is not None

    def rounded(tensor: Tensor) -> Tensor:
        return tensor if rounding is None else tensor.to(rounding).to(dtype)

    y = rounded(convolve(spec, x, own.conv_weight, own.conv_bias, dtype=dtype))
    keys = spec.num_key_heads * spec.key_size
    first, end = (0, 2 * keys) if form.order == "qkv" else (spec.conv_channels - 2 * keys, None)
    pair = y[:, first:end].reshape(len(y), 2, spec.num_key_heads, -1)
    q, k = (pair[:, i] for i in ((0, 1) if form.order == "qkv" else (1, 0)))
    v = y[:, 2 * keys :] if form.order == "qkv" else y[:, : -2 * keys]
    v = v.reshape(len(y), spec.num_heads, -1)
    rate, shifted = form.rate.to(dtype), a.to(dtype) + form.bias
    size = torch.log1p(shifted.exp())
    beta = size.clamp(*form.bounds) if b is None else form.beta_factor * b.to(dtype).sigmoid()
    decay = -rate * (beta if b is None else size) if a.dim() == 2 else size
    if form.gates == "bounded":
        decay = form.bounds[0] * (rate[:, None] * shifted).sigmoid()
    given = (spec, q, k, v, decay, beta)
    out, _ = recurrence(*given, scale=own.scale, skip=own.skip, dtype=dtype)
    rows = rounded(out).reshape(len(y), -1, form.norm_size)
    gate = z.to(dtype).view(rows.shape)
    gate = gate.sigmoid() * (gate if form.output_gate == "silu" else 1)
    rows = rows * gate if form.gate_first else rows
    rows = rows / (rows.square().mean(-1, keepdim=True) + form.norm_eps).sqrt()
    rows = rows * form.norm_weight.to(dtype).view(-1, form.norm_size)
    return rounded((rows if form.gate_first else rows * gate).flatten(1))


class _Served(NamedTuple):
    """A step that was run by `StateLayer.step`.

    Attributes:
        layer: what ran it.
        inputs: its rows, on the device; the first and the last one are of no request.
        step: its batch.
        got: its output.
        kept: the tokens of the request that stay.
        what: the step in words.
    """

    layer: LayerUnderTest
    inputs: FusedInputs
    step: Step
    got: Tensor
    kept: slice
    what: str


def _steps(target: BackendUnderTest, spec: StateSpec, given: FusedInputs) -> Iterator[_Served]:
    """A request in a prefill, decodes, drafts that are taken back, and other slots, beside padding
    with NaN. The last fork ends a chunk that its source could have continued in."""
    layer, form = LayerUnderTest(target, spec, used=False), given.form
    named: dict[str, Any] = {
        name: x.to(target.device) for name, x in vars(form).items() if torch.is_tensor(x)
    }
    moved, done, source = replace(form, **named), 0, 2
    steps = ((13, 1, 2), (1, 3, 1), (1, 0, 1), (2, 0, 1), (3, 1, 2), (1, 3, 2), (4, 0, 1))
    for stay, drafts, slot in steps:
        end, drafts = done + stay, min(drafts, spec.max_rollback)
        step = Step([1, stay + drafts], [1, end + drafts], [-1, slot], [-1, source])
        rows = torch.arange(done - 1, end + drafts + 1).clamp(0, 29)
        x, a, b, z = (None if t is None else t[rows].to(target.device) for t in given[:4])
        assert x is not None and a is not None and z is not None
        x[0] = x[-1] = z[0] = z[-1] = torch.nan
        got = torch.full_like(z, torch.nan)
        layer.layer.step(x, (a, b), z, moved, layer.cache, layer.metadata(step), output=got)
        what = f"a step of {stay + drafts} tokens from {done}"
        yield _Served(layer, FusedInputs(x, a, b, z, moved), step, got, slice(done, end), what)
        done, source = end, slot


def _values(target: BackendUnderTest, spec: StateSpec) -> str:
    """Outputs against the rules."""
    given = drawn_step(spec, 30, target.seed)
    exact = plain = None
    for served in _steps(target, spec, given):
        if exact is None or plain is None:
            own = served.layer.tensors
            exact, plain = (expected_step(spec, own, given, dtype) for dtype in (None, spec.dtype))
        rows, got = served.kept, served.got
        count = rows.stop - rows.start
        found = compare(got[1 : 1 + count].cpu(), exact[rows], plain[rows], spec.dtype)
        if not found.passed:
            return f"{served.what}: {found}"
        if bool(got[[0, -1]].any()):
            return f"{served.what}: rows of no request are not 0 (T3)"
    return ""


def _bits(target: BackendUnderTest, spec: StateSpec) -> str:
    """Outputs and slots against those of separate launches."""
    other = LayerUnderTest(target, spec, used=False)
    for served in _steps(target, spec, drawn_step(spec, 30, target.seed)):
        wanted = torch.full_like(served.got, torch.nan)
        metadata = other.metadata(served.step)
        separate_step(other.layer, served.inputs, other.cache, metadata, wanted)
        if not torch.equal(served.got, wanted):
            return f"{served.what}: separate launches give other bits"
        if not torch.equal(served.layer.memory, other.memory):
            return f"{served.what}: separate launches leave other slots"
    return ""


def _cases(target: BackendUnderTest, body: Body) -> Iterator[CheckCase]:
    names = ("gated delta", "kimi delta", "mamba2")
    most = min(ROLLBACK, target.backend.state_capabilities.max_rollback or 0)
    invariant, large = {"batch_invariant": True}, {"key_size": 64, "value_size": 64}
    # Decodes without drafts, invariant layers and large heads may have kernels of their own.
    given: list[tuple[str, int, dict[str, Any]]]
    given = [("", 0, {}), ("-invariant", 0, invariant), ("-large", 0, large)]
    if most:
        given += [("-drafts", most, {}), ("-large-drafts", most, large)]
        given += [("-invariant-drafts", most, invariant)]
    for ending, rollback, changes in given:
        for each in over_kinds(target, body, names=names, rollback=rollback, **changes):
            spec = each.state_spec
            assert spec is not None
            channels = 2 * spec.num_key_heads * spec.key_size + spec.num_heads * spec.value_size
            chosen = spec.replace(conv_channels=channels)
            yield CheckCase(each.id + ending, partial(body, target, chosen), state_spec=chosen)


_value_cases, _bit_cases = (partial(_cases, body=body) for body in (_values, _bits))


CHECKS = (
    Check("ST15", "states: steps from convolution to norm", _value_cases, kind="state"),
    Check("ST17", "states: such steps and separate launches", _bit_cases, kind="state"),
)
