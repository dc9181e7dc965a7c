"""Shadow: live calls run again on a second backend; errors are recorded per layer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.debug.record import load_recording
from attnlib.debug.replay import replay
from attnlib.debug.shadow import shadow
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.testing.case import Case
from tests.testing.toy_backend import ToyBackend, toy_with
from tests.testing.wrong_backends import BaseTwoLse, OffByOneWindow

CASE = Case(batch="mixed", sliding_window=5, needs_lse=True)


class Model(nn.Module):
    """Layers with separate caches."""

    def __init__(self, backends: list[type[AttentionBackend]], case: Case = CASE) -> None:
        super().__init__()
        self.case, self.backends = case, backends
        self.layers = nn.ModuleList(
            Attention(case.spec, backend=backend, prefix=f"layers.{number}", device="cpu")
            for number, backend in enumerate(backends)
        )

    def forward(self, flat: bool = False) -> list[Any]:
        results = []
        for layer, backend in zip(self.layers, self.backends, strict=True):
            step = self.case.materialize(kv_written=False)
            inputs = step.inputs
            metadata = backend.make_builder(step.spec, "cpu").build(0, step.common())
            tensors = [
                t.flatten(1) if flat else t for t in (inputs.query, inputs.key, inputs.value)
            ]
            results.append(layer(*tensors, step.cache(), metadata, return_lse=True))
        return results


def test_agreement_is_recorded_per_layer(tmp_path: Path) -> None:
    model = Model([ToyBackend, ToyBackend])
    with shadow("torch", dump_dir=tmp_path) as log:
        model()
        model(flat=True)
    assert log.passed
    assert log.calls == 4
    assert [record.layer for record in log.records] == ["layers.0", "layers.1"] * 2
    assert all(0 < record.out_error < 1e-5 for record in log.records)
    assert all(record.lse_error is not None and record.lse_error < 1e-5 for record in log.records)
    assert list(tmp_path.iterdir()) == []
    assert "layers.1" in str(log)


def test_shadowing_does_not_change_the_live_result() -> None:
    model = Model([ToyBackend])
    plain = model()[0][0]
    with shadow("torch"):
        shadowed = model()[0][0]
    assert torch.equal(plain, shadowed)


def test_a_wrong_layer_is_reported_and_its_call_recorded(tmp_path: Path) -> None:
    wrong = toy_with(OffByOneWindow)
    with shadow("torch", dump_dir=tmp_path) as log:
        Model([ToyBackend, wrong])()
    assert not log.passed
    good, bad = log.records
    assert not good.message
    assert "over budget" in bad.message
    assert bad.path is not None
    step = load_recording(bad.path)
    assert not replay(step, wrong).passed
    assert replay(step, "torch").passed
    assert f"written to {bad.path}" in str(log)


def test_a_wrong_lse_is_found(tmp_path: Path) -> None:
    """L1: the outputs agree and the LSEs differ."""
    with shadow("torch", dump_dir=tmp_path) as log:
        Model([toy_with(BaseTwoLse)])()
    (record,) = log.records
    assert record.out_error < 1e-5
    assert record.lse_error is not None and record.lse_error > 0.5
    assert "lse over budget" in record.message


def test_every_counts_calls_per_layer() -> None:
    model = Model([ToyBackend, ToyBackend])
    with shadow("torch", every=3) as log:
        for _ in range(7):
            model()
    assert log.calls == 14
    assert [(record.layer, record.call) for record in log.records] == [
        (f"layers.{layer}", call) for call in (0, 3, 6) for layer in (0, 1)
    ]


def test_a_skipped_call_has_a_reason_and_does_not_pass() -> None:
    with shadow(toy_with(sliding_window=False)) as log:
        Model([ToyBackend])()
    assert "sliding_window=5: not supported" in log.records[0].skipped
    assert not log.passed


def test_requests_of_a_call_that_writes_nothing_may_share_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines warm up with batches whose requests all read one block."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer = Attention(CASE.spec, backend=ToyBackend, prefix="warm-up", device="cpu")
    step = Case(batch="q1s7_q1s7", sliding_window=5, needs_lse=True).materialize()
    common = step.common().replace(slot_mapping=None)
    common.block_table_tensor[:] = common.block_table_tensor[0].clone()
    metadata = ToyBackend.make_builder(CASE.spec, "cpu").build(0, common)
    with shadow("torch") as log:
        layer(step.inputs.query, None, None, step.cache(), metadata, return_lse=True)
    assert log.passed


def test_the_observer_is_removed_after_the_block() -> None:
    model = Model([ToyBackend])
    with shadow("torch") as log:
        pass
    model()
    assert log.records == []


def test_every_below_one_raises() -> None:
    for given, message in (
        ({"every": 0}, "every=0 must be at least 1"),
        ({"every": None}, "every .*is a NoneType"),
        ({"dump_dir": 3}, "3 is not a path"),
    ):
        with pytest.raises(ContractError, match=message), shadow("torch", **given):
            pass


def test_validate_2_compares_every_call_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATTNLIB_VALIDATE=2 warns about a wrong layer and names the recording."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "2")
    monkeypatch.setenv("ATTNLIB_DUMP_DIR", str(tmp_path))
    with pytest.warns(
        UserWarning,
        match="layers.1 on OffByOneWindow differs from the torch backend: out over budget",
    ):
        Model([ToyBackend, toy_with(OffByOneWindow)])()
    (path,) = tmp_path.iterdir()
    assert not replay(load_recording(path), toy_with(OffByOneWindow)).passed
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Model([toy_with(OffByOneWindow)])()


def test_calls_with_a_score_function_are_compared(tmp_path: Path) -> None:
    """Layer tensors and batch tensors reach the second backend."""
    case = Case(batch="mixed", score="attnlib.testing.score_functions:REQUESTS")
    step = case.materialize(kv_written=False)
    tensors = {name: 3 * tensor for name, tensor in step.score_tensors().items()}
    layer = Attention(case.spec, backend=ToyBackend, device="cpu", score_tensors=tensors)
    metadata = ToyBackend.make_builder(case.spec, "cpu").build(0, step.common())
    inputs = step.inputs
    with shadow("torch", dump_dir=tmp_path) as log:
        layer(inputs.query, inputs.key, inputs.value, step.cache(), metadata)
    assert log.calls == 1 and log.passed
    assert 0 < log.records[0].out_error < 1e-5


def test_calls_are_counted_by_layer_not_by_address(tmp_path: Path) -> None:
    """A layer that is made where another one was freed begins at its first call, and layers of one
    prefix have rows and files of their own."""
    step = CASE.materialize(kv_written=False)
    inputs = step.inputs
    wrong = toy_with(OffByOneWindow)

    def call() -> Attention:
        layer = Attention(step.spec, backend=wrong, prefix="layers.0", device="cpu")
        metadata = layer.backend.make_builder(step.spec, "cpu").build(0, step.common())
        layer(inputs.query, inputs.key, inputs.value, step.cache(), metadata)
        return layer

    with shadow("torch", every=2, dump_dir=tmp_path) as log:
        for _ in range(4):  # each is freed at once
            call()
        kept = [call(), call()]
    assert len(kept) == 2 and [record.call for record in log.records] == [0] * 6
    assert len({record.layer for record in log.records}) == 6
    paths = {record.path for record in log.records}
    assert len(paths) == 6 and paths == set(tmp_path.iterdir())
