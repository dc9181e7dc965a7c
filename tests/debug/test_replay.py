"""Replay compares a recorded call with the oracle; shrink reduces a failing one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnlib.debug.record import load_recording, save_recording
from attnlib.debug.replay import replay, shrink
from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.case import Case
from attnlib.testing.outcome import UnsupportedCase
from tests.debug.recorded_calls import CASES, captured
from tests.testing.toy_backend import ToyBackend, toy_with
from tests.testing.wrong_backends import OffByOneWindow, SinkIgnoredInDecode


def test_replay_does_not_modify_the_recording() -> None:
    """Two replays of one recording agree, also if the backend writes the cache."""
    step = captured(CASES["mixed"], kv_written=False)
    first, second = replay(step, ToyBackend), replay(step, ToyBackend)
    assert first.output is not None and second.output is not None
    assert torch.equal(first.output.out, second.output.out)


def test_a_wrong_backend_fails_with_its_error_and_the_case() -> None:
    result = replay(captured(CASES["window"]), toy_with(OffByOneWindow))
    assert not result.passed
    assert "over budget: max error" in str(result)
    assert "sliding_window=5" in str(result)


def test_an_unsupported_call_raises_with_the_reason() -> None:
    with pytest.raises(UnsupportedCase, match="attention sinks: not supported"):
        replay(captured(CASES["sinks"]), toy_with(sink=False))


def test_an_exception_in_the_backend_is_a_failure() -> None:
    class Raises(OffByOneWindow):
        def left_keys(self, query_len: int) -> int | None:
            raise ZeroDivisionError("oops")

    result = replay(captured(CASES["window"]), toy_with(Raises))
    assert result.message == "raised ZeroDivisionError: oops"


def test_shrink_finds_the_failing_request() -> None:
    """Only decodes with sinks are wrong: one decode of eight requests remains."""
    case = Case(batch="2q9s20_q1s33_q4_q7s11_2q2s40_q5", sinks=True)
    backend = toy_with(SinkIgnoredInDecode)
    smallest = shrink(captured(case), lambda step: not replay(step, backend).passed)
    assert smallest.inputs.batch.num_reqs == 1
    assert smallest.inputs.batch.query_lens == (1,)
    assert not replay(smallest, backend).passed


def test_slices_keep_the_batch_tensors_of_their_requests() -> None:
    """`shrink` compares slices with the oracle, so their score functions need the same tensors."""
    case = Case(batch="q3s9_q1s5_q4s12", score="attnlib.testing.score_functions:REQUESTS")
    step = captured(case)
    shifts = step.score_tensors("batch_tensors")["shift"]
    assert shifts.tolist() == [[0], [1], [2]]
    smaller = slice_batch(step, [2, 1])
    assert smaller.score_tensors("batch_tensors")["shift"].tolist() == [[2], [1]]
    assert replay(smaller, ToyBackend).passed
    whole, part = step.oracle().out, smaller.oracle().out
    assert torch.equal(part[:4], whole[4:])
    assert torch.equal(part[4:], whole[3:4])


def test_shrink_reduces_queries_to_one_token(tmp_path: Path) -> None:
    case = Case(batch="q12s30_q9s40", sliding_window=4)
    backend = toy_with(OffByOneWindow)
    smallest = shrink(captured(case), lambda step: not replay(step, backend).passed)
    assert smallest.inputs.batch.query_lens == (1,)
    loaded = load_recording(save_recording(smallest, tmp_path / "small.pt"))
    assert not replay(loaded, backend).passed
    assert replay(loaded, ToyBackend).passed


def test_shrink_returns_a_passing_step_unchanged() -> None:
    step = captured(CASES["mixed"])
    assert shrink(step, lambda candidate: not replay(candidate, ToyBackend).passed) is step
