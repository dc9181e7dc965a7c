"""Calls of state layers that are recorded, and replayed on the same and on other backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib.backends.torch.states import TorchStateImpl
from attnlib.debug.record import record_calls
from attnlib.debug.replay import replay_state, shrink_state
from attnlib.debug.state_calls import StateOutcome, load_state_recording, save_state_recording
from attnlib.errors import ContractError
from attnlib.instrumentation import STATE_OBSERVERS
from attnlib.ops.states import StepForm
from attnlib.selection import unregister_backend
from attnlib.testing.commands import replay_main
from attnlib.testing.outcome import UnsupportedCase
from tests.debug.state_layers import GDN, SPECS, Served
from tests.testing.wrong_states import RIGHT_STATES, WRONG_STATES, _backend


def recorded(served: Served, folder: Path) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """The files of a mixed step after a prefill, and its outputs."""
    served.prefill()
    with record_calls(folder) as files:
        outputs = served.mixed()
    assert not STATE_OBSERVERS
    return files, outputs


@pytest.mark.parametrize("name", SPECS)
def test_a_recorded_call_replays_to_the_same_bits(name: str, tmp_path: Path) -> None:
    served = Served(SPECS[name], prefix="model/layer")
    files, outputs = recorded(served, tmp_path)
    assert [file.name for file in files] == [f"model_layer.{part}-0.pt" for part in outputs]
    for file in files:
        call = load_state_recording(file)
        result = replay_state(call, "torch")
        assert result.passed and isinstance(result.output, StateOutcome), str(result)
        assert torch.equal(result.output.out, outputs[call.part])
        assert call.spec == served.spec and len(call.memory) == 4  # slots 0, 3, 4 and 5
        again = load_state_recording(save_state_recording(call, tmp_path / "again.pt"))
        assert replay_state(again, "torch").passed


def test_strides_are_kept(tmp_path: Path) -> None:
    files, _ = recorded(Served(SPECS["gla"]), tmp_path)
    value = load_state_recording(files[0]).inputs[2]
    assert value is not None and value.stride(1) == 2 * SPECS["gla"].value_size


@pytest.mark.parametrize(
    "name", ["gated delta", "drafts in a tail", "drafts in snapshots", "mamba2"]
)
def test_slots_of_another_form(name: str, tmp_path: Path) -> None:
    """A backend with `plain` slots gets the states before the call; a tail begins at multiples of
    its chunk size only."""
    files, _ = recorded(Served(SPECS[name]), tmp_path)
    for file in files:
        call = load_state_recording(file)
        assert replay_state(call, RIGHT_STATES["plain"]).passed
        if call.part == "convolution" or call.spec.form == "tail":
            assert replay_state(call, RIGHT_STATES["tail"]).passed
        else:
            with pytest.raises(UnsupportedCase, match="begins at multiples of chunk_size=16"):
                replay_state(call, RIGHT_STATES["tail"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("output before update", "recurrence: out"),
        ("scaled skip", "recurrence: out"),
        ("rounded between steps", "the state after it differs"),
        ("rows past the batch of states", "is not 0"),
        ("bias after activation", "convolution: out"),
        ("source written", "the source of request 0 differs"),
    ],
)
def test_a_wrong_backend_fails_its_replay(error: str, message: str, tmp_path: Path) -> None:
    """By the outputs, or by the states after the call alone."""
    backend, _ = WRONG_STATES[error]
    files, _ = recorded(Served(SPECS["mamba2"], RIGHT_STATES["plain"]), tmp_path)
    results = [replay_state(load_state_recording(file), backend) for file in files]
    (wrong,) = [result for result in results if not result.passed]
    assert message in wrong.message, str(wrong)


def test_the_command_replays_and_reduces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = recorded(Served(SPECS["gated delta"]), tmp_path)
    backend, _ = WRONG_STATES["delta before decay"]
    attnlib.register_backend("delta_before_decay", backend, priority=None)
    try:
        assert replay_main([str(files[1]), "torch"]) == 0
        assert "torch on q1s19_q3s8_q1s9_q0s1_q4: within the error" in capsys.readouterr().out
        target = tmp_path / "small.pt"
        options = ["delta_before_decay", "--shrink", str(target)]
        assert replay_main([str(files[1]), *options]) == 1
        assert "smallest failing batch: " in capsys.readouterr().out
        assert len(load_state_recording(target).slots) == 1
        assert replay_main([str(target), options[0]]) == 1
    finally:
        unregister_backend("delta_before_decay")
    call = load_state_recording(files[1])
    assert shrink_state(call, lambda part: not replay_state(part, "torch").passed) is call


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    files, _ = recorded(Served(SPECS["gla"]), tmp_path)
    from attnlib.debug.record import load_recording

    with pytest.raises(ContractError, match="call of a state layer: replay it"):
        load_recording(files[0])
    data = torch.load(files[0], weights_only=True)
    damaged = tmp_path / "damaged.pt"
    for change in ({"attnlib_state_recording": 7}, {"memory": None}, {"spec": {}}):
        torch.save({**data, **change}, damaged)
        with pytest.raises(ContractError, match="record the call again"):
            load_state_recording(damaged)


def test_every_counts_the_parts_one_by_one(tmp_path: Path) -> None:
    served = Served(SPECS["gated delta"], prefix="a")
    with record_calls(tmp_path, every=2) as files:
        for total in range(1, 4):
            served.step([1], [total], [0])
    names = sorted(file.name for file in files)
    assert names == [
        "a.convolution-0.pt",
        "a.convolution-2.pt",
        "a.recurrence-0.pt",
        "a.recurrence-2.pt",
    ]


def test_a_fused_step_is_recorded_in_its_parts(tmp_path: Path) -> None:
    """Calls that are observed run in separate launches, which have the same bits."""

    class Fused(TorchStateImpl):
        def plan_fused_step(self, *call: object) -> Callable[..., None]:
            return lambda impl, inputs, cache, metadata, output: output.fill_(7.0)

    spec = GDN.replace(conv_channels=128)
    layer = Served(spec, _backend(Fused)).layer
    cache = attnlib.StateCache.allocate(layer.spec, 2, device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([2], [2], device="cpu", state_slots=[1])
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
    x, gates = torch.randn(2, 128), (-torch.rand(2, 4), torch.rand(2, 4))
    assert bool((layer.step(x, gates, None, StepForm(), cache, metadata) == 7.0).all())
    with record_calls(tmp_path) as files:
        out = layer.step(x, gates, None, StepForm(), cache, metadata)
    assert [load_state_recording(file).part for file in files] == ["convolution", "recurrence"]
    result = replay_state(load_state_recording(files[1]), "torch")
    assert isinstance(result.output, StateOutcome)
    assert torch.equal(result.output.out.flatten(1), out)
