"""The `fla` backend over fakes with the signatures of fla-core 0.6, and over its own kernels in
Triton's interpreter where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends._foreign.packed_states import PackedBatch
from attnlib.backends.fla import FlaBackend
from attnlib.backends.fla.impl import FlaStateImpl
from attnlib.backends.fla.probe import MODULES, find_functions
from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.layer import StateLayer
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.testing.conformance import run_conformance
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from tests.backends.cpu_backend import H200
from tests.backends.fla import fake
from tests.fresh_process import run_module

RECURRENT = {name: spec for name, spec in KINDS.items() if spec.has_recurrence}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake.Calls]:
    yield fake.install(monkeypatch)
    find_functions.cache_clear()


def on_cpu(
    impl: type[attnlib.StateImpl] = FlaStateImpl, dtype: torch.dtype = torch.float32, **config: int
) -> type[attnlib.AttentionBackend]:
    """The backend on a CPU."""
    declared = dataclasses.replace(
        FlaBackend.state_capabilities, devices=("cpu", "cuda"), dtypes=(dtype,)
    )
    body = {
        "state_capabilities": declared,
        "config": config,
        "unavailable": classmethod(lambda cls, device: []),
        "get_state_impl_cls": staticmethod(lambda: impl),
        "__module__": __name__,
    }
    return type("OnCpu", (FlaBackend,), body)


def run(backend: Any, spec: attnlib.StateSpec, lengths: list[int]) -> tuple[StateLayer, Any]:
    """New requests in slots 3, 2, ...; the layer and its output."""
    tensors = {k: v for k, v in vars(draw_layer(spec)).items() if k != "scale"}
    layer = StateLayer(spec, backend=backend, device="cpu", **tensors)
    cache = StateCache.allocate(layer.spec, 5, device="cpu")
    slots = [3 - n for n in range(len(lengths))]
    common = CommonAttentionMetadata.from_lengths(
        lengths, lengths, device="cpu", state_slots=torch.tensor(slots, dtype=torch.int32)
    )
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
    given = draw_tokens(spec, sum(lengths), 1)
    assert given.query is not None and given.key is not None and given.value is not None
    gates = given.log_decay, given.beta
    return layer, layer(given.query, given.key, given.value, *gates, cache, metadata)


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_what_the_functions_are_given(kind: str, form: str, calls: fake.Calls) -> None:
    """Log decays as they are, states as `[Dv, Dk]`, the scale once, one call for all requests."""
    spec = RECURRENT[kind].replace(dtype=torch.float16)
    backend = on_cpu(dtype=torch.float16, chunk_from=1 if form == "chunk" else 999)
    run(backend, spec, [3, 1])
    ((name, given),) = calls
    ends = {"gated delta": "gated_delta_rule", "kimi delta": "kda", "gla": "gla"}
    assert name == f"{form}_{ends.get(kind, 'simple_gla')}"
    assert given["state_v_first"] and given["scale"] == spec.default_scale
    assert given["cu_seqlens"].tolist() == [0, 3, 4]
    assert given["initial_state"].shape == (2, spec.num_heads, spec.value_size, spec.key_size)
    assert given.get("use_qk_l2norm_in_kernel", False) is spec.qk_norm
    assert ("cu_seqlens_cpu" in given and given["cu_seqlens_cpu"] is not None) is (form == "chunk")


def test_short_steps_and_float32_run_in_the_recurrent_form(calls: fake.Calls) -> None:
    spec = RECURRENT["gated delta"]
    run(on_cpu(chunk_from=1), spec, [70])
    for length in (64, 65):
        run(on_cpu(dtype=torch.float16), spec.replace(dtype=torch.float16), [length])
    names = [name.removesuffix("_gated_delta_rule") for name, _ in calls]
    assert names == ["fused_recurrent", "fused_recurrent", "chunk"]


def test_slots_are_checked_where_they_are_read(calls: fake.Calls) -> None:
    """T7: the impl itself checks them, since layers do so on a CPU only."""
    spec = RECURRENT["gated delta"]
    layer, output = run(on_cpu(), spec, [2, 1])
    cache, tokens = StateCache.allocate(layer.spec, 5, device="cpu"), draw_tokens(spec, 3, 1)
    before = cache.memory.clone()
    for slots, message in (([3, 5], r"\[1\]=5 is outside the pool of 5"), ([2, 2], "are both 2")):
        common = CommonAttentionMetadata.from_lengths(
            [2, 1], [2, 1], device="cpu", state_slots=torch.tensor(slots, dtype=torch.int32)
        )
        metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
        with pytest.raises(ContractError, match=f"state_slots.*{message}"):
            layer.impl.step(StateInputs(*list(vars(tokens).values())[1:]), cache, metadata, output)
    assert len(calls) == 1 and torch.equal(cache.memory, before)


@pytest.mark.parametrize("update", ["delta", "add"])
@pytest.mark.parametrize("decay", ["head", "channel", "constant"])
@pytest.mark.parametrize("has_beta", [True, False])
def test_every_combination_agrees_with_torch(
    update: str, decay: str, has_beta: bool, calls: fake.Calls
) -> None:
    """Those that no model has, too: constant decays of a delta layer, norms without one."""
    changes = {"update": update, "decay": decay, "has_beta": has_beta, "has_skip": True}
    spec = RECURRENT["gated delta"].replace(**changes)
    _, found = run(on_cpu(), spec, [5, 0, 2])
    _, expected = run("torch", spec, [5, 0, 2])
    torch.testing.assert_close(found, expected)
    assert len(calls) == 1


def test_a_wrong_setting() -> None:
    with pytest.raises(ContractError, match="chunk_from"):
        run(on_cpu(chunk_from=0), RECURRENT["gla"], [1])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_it_conforms(form: str, calls: fake.Calls) -> None:
    dtype = torch.float16 if form == "chunk" else torch.float32
    backend = on_cpu(dtype=dtype, chunk_from=1)
    only = None if form == "fused_recurrent" else "ST1,ST2,ST3,ST7,ST8,ST11"
    report = run_conformance(backend, device="cpu", quick=True, only=only, against=[])
    assert report.passed, str(report)
    assert {name for name, _ in calls} == {f"{form}_{module}" for module in MODULES}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_it_conforms_over_its_own_kernels(form: str) -> None:
    """In Triton's interpreter; on a GPU, tests/gpu/test_states.py does it."""
    if not importlib.util.find_spec("fla"):
        pytest.skip("flash-linear-attention is not installed")
    options = ["float16", "1"] if form == "chunk" else ["float32", "999"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_module("tests.backends.fla.interpreted", [*options, "ST1,ST8"], environment)
    assert done.returncode == 0, done.stdout + done.stderr


class _KeysFirst(FlaStateImpl):
    """States are left in the order of the package, `[Dk, Dv]`."""

    def recur(self, inputs: StateInputs, initial: torch.Tensor, batch: PackedBatch) -> Any:
        square = initial.shape[2] == initial.shape[3]
        out, final = super().recur(inputs, initial.mT if square else initial, batch)
        return out, final.mT if square else final


class _ReadsFreshSlots(FlaStateImpl):
    """The slot of a new request is gathered like others, with what another request left."""

    def _run(self, batch: Any, inputs: Any, cache: Any, output: torch.Tensor) -> None:
        if batch is not None:
            batch = dataclasses.replace(batch, fresh=torch.zeros_like(batch.fresh))
        super()._run(batch, inputs, cache, output)


class _DecayIsAFactor(FlaStateImpl):
    """The decay itself, as FlashInfer takes it."""

    def recur(self, inputs: StateInputs, initial: torch.Tensor, batch: PackedBatch) -> Any:
        return super().recur(inputs._replace(log_decay=inputs.log_decay.exp()), initial, batch)


class _ScaledTwice(FlaStateImpl):
    """q is scaled, and the function scales it by its argument."""

    def recur(self, inputs: StateInputs, initial: torch.Tensor, batch: PackedBatch) -> Any:
        out, final = super().recur(inputs, initial, batch)
        return out * self.scale, final  # outputs are linear in q


class _PaddingIsTheLastSlot(FlaStateImpl):
    """Slot -1 is an index like others."""

    def _run(self, batch: Any, inputs: Any, cache: Any, output: torch.Tensor) -> None:
        super()._run(batch, inputs, cache, output)
        if not bool((output != 0).any(-1).any(-1).all()):
            cache.tensors.state[-1] = 1.0


class _KeptInDtype(FlaStateImpl):
    """Final states are rounded to the dtype of the inputs."""

    def recur(self, inputs: StateInputs, initial: torch.Tensor, batch: PackedBatch) -> Any:
        out, final = super().recur(inputs, initial, batch)
        return out, final.bfloat16().float()


class _StepIsTheWindow(FlaStateImpl):
    """The window is the end of the step: W columns of it, in place of the last W - 1 inputs."""

    def convolve(self, x: Any, cache: Any, metadata: Any, output: torch.Tensor) -> None:
        super().convolve(x, cache, metadata, output)
        window = cache.tensors.window
        for request in metadata.batch.requests():
            first = max(request.computed, request.end - self.spec.conv_width)
            window[request.slot] = 0
            for p in range(first, request.end):
                row = x[request.start + p - request.computed]
                window[request.slot, p % window.shape[1]] = row


class _FirstStateOfASlot(FlaStateImpl):
    """A step begins with the first state of a slot, whichever position that one stands for."""

    def _run(self, step: Any, inputs: Any, cache: Any, output: torch.Tensor) -> None:
        if step is not None:
            step = dataclasses.replace(step, numbers=torch.zeros_like(step.numbers))
        super()._run(step, inputs, cache, output)


class _LastStateOnly(FlaStateImpl):
    """The state behind the step stands for all positions that the slot can continue from."""

    def _run(self, step: Any, inputs: Any, cache: Any, output: torch.Tensor) -> None:
        super()._run(step, inputs, cache, output)
        if step is not None:
            stored = cache.tensors.state
            ends = step.positions.flatten(1)[:, 1].long() % stored.shape[1]
            stored[step.slots] = stored[step.slots, ends][:, None]


class _ForksLoseTheirFirstState(FlaStateImpl):
    """What a step reads in another slot is not kept in its own."""

    def _run(self, step: Any, inputs: Any, cache: Any, output: torch.Tensor) -> None:
        if step is not None:
            step = dataclasses.replace(step, copied=step.copied[:0])
        super()._run(step, inputs, cache, output)


class _StatesFromTheFirstToken(FlaStateImpl):
    """A slot says that it can continue from where the step began."""

    def _run(self, step: Any, inputs: Any, cache: Any, output: torch.Tensor) -> None:
        super()._run(step, inputs, cache, output)
        if step is not None and cache.layout.num_states > 1:
            cache.tensors.positions[step.slots, ..., 0] = 0


WRONG: dict[str, tuple[type[FlaStateImpl], str]] = {
    "keys first": (_KeysFirst, "ST8"),
    "reads fresh slots": (_ReadsFreshSlots, "ST1"),
    "decay is a factor": (_DecayIsAFactor, "ST1"),
    "scaled twice": (_ScaledTwice, "ST1"),
    "padding is the last slot": (_PaddingIsTheLastSlot, "ST6"),
    "kept in 16 bits": (_KeptInDtype, "ST14"),
    "the step is the window": (_StepIsTheWindow, "ST5"),
    "first state of a slot": (_FirstStateOfASlot, "ST4"),
    "last state only": (_LastStateOnly, "ST4"),
    "forks lose their first state": (_ForksLoseTheirFirstState, "ST8"),
    "states from the first token": (_StatesFromTheFirstToken, "ST10"),
}
"""Trap of a wrapper -> (a wrapper that falls into it, the check that finds it)."""


@pytest.mark.parametrize("trap", WRONG)
def test_a_wrong_wrapper_fails_verification(trap: str, calls: fake.Calls) -> None:
    impl, check = WRONG[trap]
    report = run_conformance(on_cpu(impl), device="cpu", quick=True, only=check, against=[])
    assert report.failed_checks() == (check,), str(report)
    assert not any(result.message.startswith("raised ") for result in report.failures), str(report)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_rollback": 17}, "max_rollback=17 not supported (up to 16)"),
        ({"batch_invariant": True}, "batch_invariant=True"),
        ({"form": "tail"}, "form=tail"),
        ({"key_size": 24}, "key_size=24"),
        ({"dtype": torch.float64}, "dtype=float64"),
    ],
)
def test_reasons(changes: dict[str, Any], reason: str) -> None:
    spec = RECURRENT["gated delta"]
    assert FlaBackend.state_reasons(spec, H200) == []
    found = FlaBackend.state_reasons(spec.replace(**changes), H200)
    assert any(reason in text for text in found), found
    assert FlaBackend.state_reasons(spec, DeviceInfo("cuda", 0, (7, 5)))


def test_explain_says_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    find_functions.cache_clear()
    monkeypatch.setitem(sys.modules, "fla", None)  # type: ignore[arg-type]  # forbids the import
    hypothetical = DeviceInfo("cuda", 0, (9, 0), is_hypothetical=True)
    report = str(attnlib.explain(RECURRENT["gated delta"], hypothetical))
    assert "fla is not installed: pip install flash-linear-attention" in report
    fake.install(monkeypatch)
    assert FlaBackend.unavailable(H200) == []
    older = ModuleType("fla.ops.kda")
    older.chunk_kda = lambda q, transpose_state_layout=False: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.kda", older)
    find_functions.cache_clear()
    (reason,) = FlaBackend.unavailable(H200)
    assert "chunk_kda has no state_v_first" in reason
    find_functions.cache_clear()
