"""State layers on the `triton` backend beside the torch backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.errors import ContractError
from attnlib.layer.state_fused import separate_step
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.testing.conformance import run_conformance
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from tests.layer.test_state_fused import FORM, SPEC, tokens


@pytest.mark.parametrize("name", ["gated delta", "short convolution"])
def test_layers_equal_those_of_torch(device: torch.device, name: str) -> None:
    """Two steps with drafts, lengths and slots on the device only."""
    spec, results = KINDS[name].replace(max_rollback=2), []
    own, tokens = draw_layer(spec), draw_tokens(spec, 12, 3)
    inputs = {key: x.to(device) for key, x in tokens.tensors().items()}
    weights = {
        key: None if x is None else x.to(device) for key, x in vars(own).items() if key != "scale"
    }
    for backend in ("triton", "torch"):
        with attnlib.use_backend(backend):
            layer = attnlib.StateLayer(spec, **weights, device=device)
        cache = attnlib.StateCache.allocate(layer.spec, 4, device=device)
        builder, outs = layer.backend.make_builder(layer.spec, device), []
        for first, end in ((0, 9), (7, 9), (8, 12)):
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [end - first, 0], [end, 0], device=device, state_slots=[2, -1]
            )
            metadata = builder.build(0, common)
            rows = {key: x[first:end] for key, x in inputs.items()}
            if spec.has_convolution:
                outs.append(layer.convolve(rows["x"], cache, metadata).float())
            if spec.has_recurrence:
                names = ("query", "key", "value", "log_decay", "beta")
                outs.append(layer(*map(rows.get, names), cache, metadata).float().flatten(1))
        results.append(outs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_fused_steps_have_the_bits_of_separate_launches(device: torch.device) -> None:
    """Two decodes beside padding; outputs and slots. The step is one launch."""
    x, gates, z = (
        tuple(t.to(device) for t in each) if isinstance(each, tuple) else each.to(device)
        for each in tokens(4)
    )
    tensors = {k: t.to(device) for k, t in vars(FORM).items() if isinstance(t, torch.Tensor)}
    form = dataclasses.replace(FORM, **tensors)
    own = draw_layer(SPEC).conv_weight.to(device)
    layer = attnlib.StateLayer(SPEC, backend="triton", conv_weight=own, device=device)
    size = (3, layer.layout.bytes_per_slot)
    caches = [
        attnlib.StateCache(layer.spec, torch.zeros(size, dtype=torch.uint8, device=device))
        for _ in range(2)
    ]
    builder = layer.backend.make_builder(layer.spec, device)
    for end in (2, 3):
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [2, 1], [end, 1], device=device, state_slots=[1, -1]
        )
        metadata = builder.build(0, common)
        got = layer.step(x, gates, z, form, caches[0], metadata)
        wanted = torch.full_like(got, 3)
        separate_step(layer, FusedInputs(x, *gates, z, form), caches[1], metadata, wanted)
        assert torch.equal(got, wanted) and got[:2].all() and not got[2:].any()
        assert torch.equal(caches[0].memory, caches[1].memory)
        (fused,) = (run for key, run in metadata.plans.items() if key[0] == form.scalars)
        assert fused.__qualname__.startswith("TritonStateImpl.plan_fused_step")


def test_fused_steps_are_validated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ATTNLIB_VALIDATE, a step from a position that the slot does not have is an error."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    x, gates, z = tokens(1)
    own = draw_layer(SPEC).conv_weight.to(device)
    layer = attnlib.StateLayer(SPEC, backend="triton", conv_weight=own, device=device)
    cache = attnlib.StateCache.allocate(layer.spec, 2, device=device)
    builder = layer.backend.make_builder(layer.spec, device)
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [8], device=device, state_slots=[1])
    moved = [t.to(device) for t in (x, *gates, z)]
    gate = torch.ones_like(moved[1])
    form = StepForm(norm_size=0)
    with pytest.raises(ContractError, match="the window in slot 1 can continue from -1 to -1"):
        layer.step(moved[0], (-gate, gate), None, form, cache, builder.build(0, common))
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [1], device=device, state_slots=[1])
    with pytest.raises(ContractError, match=r"log_decay\[0\]\[0\]=1 must be finite and at most 0"):
        layer.step(moved[0], (gate, gate), None, form, cache, builder.build(0, common))


@pytest.mark.slow
@pytest.mark.parametrize("fills_chip", [False, True])
def test_fused_steps_pass_their_check(monkeypatch: pytest.MonkeyPatch, fills_chip: bool) -> None:
    """Gated delta, Kimi delta and Mamba2 with drafts and without, other slots and NaN in padding;
    with the kernels of few heads and of many."""
    kind_of = state_tiles.kind_of_step
    monkeypatch.setattr(
        state_tiles, "kind_of_step", lambda *facts: kind_of(*facts[:3], fills_chip, facts[4])
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = run_conformance(TritonBackend, device=device, quick=True, only="ST15,ST17")
    assert report.passed and len(report.results) == 36, str(report)
