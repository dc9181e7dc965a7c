"""Live calls of state layers, compared with a second backend."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.torch.states import TorchStateImpl
from attnlib.debug.replay import replay_state
from attnlib.debug.shadow import shadow
from attnlib.debug.state_calls import load_state_recording
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS, STATE_OBSERVERS
from tests.debug.state_layers import SPECS, Served
from tests.testing.wrong_states import RIGHT_STATES, WRONG_STATES, _backend


@pytest.mark.parametrize(
    "name", ["gated delta", "drafts in a tail", "lightning", "short convolution"]
)
def test_right_backends_agree(name: str, tmp_path: Path) -> None:
    """Of other forms, too; the live results and states do not change."""
    alone, served = Served(SPECS[name]), Served(SPECS[name])
    alone.prefill()
    expected = alone.mixed()
    with shadow(RIGHT_STATES["plain"], dump_dir=tmp_path) as log:
        served.prefill()
        found = served.mixed()
    assert log.passed and log.calls == 2 * len(found) and not list(tmp_path.iterdir()), str(log)
    assert all(torch.equal(found[part], expected[part]) for part in expected)
    assert not OBSERVERS and not STATE_OBSERVERS


@pytest.mark.parametrize("error", ["beta of the value only", "rounded between steps"])
def test_a_wrong_live_call_is_recorded(error: str, tmp_path: Path) -> None:
    """Also one that stores a wrong state and returns right outputs."""
    backend, _ = WRONG_STATES[error]
    served = Served(SPECS["gated delta"], backend, prefix="layer")
    with shadow("torch", dump_dir=tmp_path) as log:
        served.prefill()
    wrong = [record for record in log.records if record.message]
    assert not log.passed and [record.layer for record in wrong] == ["layer.recurrence"]
    assert wrong[0].path is not None and "written to" in str(log)
    call = load_state_recording(wrong[0].path)
    assert not replay_state(call, backend).passed and replay_state(call, "torch").passed


def test_slots_without_positions_are_a_result(tmp_path: Path) -> None:
    """What has no state to compare does not stop the live process."""

    class NoPositions(TorchStateImpl):
        def step(self, inputs: Any, cache: Any, metadata: Any, output: torch.Tensor) -> None:
            before = cache.tensors.positions.clone()
            super().step(inputs, cache, metadata, output)
            cache.tensors.positions.copy_(before)

    served = Served(SPECS["gla"], _backend(NoPositions))
    with shadow("torch", dump_dir=tmp_path) as log:
        served.prefill()
    (record,) = log.records
    assert "after the call, " in record.message and record.path is not None
    with shadow(served.layer.backend, dump_dir=tmp_path) as log:
        Served(SPECS["gla"]).prefill()
    assert "after the call, " in log.records[0].skipped


def test_what_the_second_backend_has_not_is_skipped() -> None:
    served = Served(SPECS["gated delta"], RIGHT_STATES["plain"])
    with shadow(RIGHT_STATES["tail"]) as log:
        served.prefill()
        served.mixed()
    skipped = [record for record in log.records if record.skipped]
    assert [record.layer for record in skipped] == ["layer0.recurrence"]
    assert "begins at multiples of chunk_size=16" in skipped[0].skipped


def test_level_2_compares_state_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNLIB_DUMP_DIR", str(tmp_path))
    wrong = Served(SPECS["gated delta"], WRONG_STATES["delta before decay"][0], prefix="wrong")
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong.prefill()
        assert not STATE_OBSERVERS
        monkeypatch.setenv("ATTNLIB_VALIDATE", "2")
        Served(SPECS["gated delta"], RIGHT_STATES["plain"]).prefill()
    with pytest.warns(UserWarning, match="differs from the torch backend.*recorded in"):
        wrong.prefill()
    assert len(list(tmp_path.iterdir())) == 1


def test_level_2_checks_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused is not compared."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "2")
    served = Served(SPECS["gated delta"], RIGHT_STATES["plain"])
    with pytest.raises(ContractError, match="T8"):
        served.step([1], [9], [0])
