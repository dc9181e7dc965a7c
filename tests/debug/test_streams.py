"""One builder on two streams: batches that overlap are refused. Streams and events are stand-ins;
tests/gpu/test_streams.py uses those of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.debug import streams
from attnlib.errors import ContractError


class _Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class _Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[_Event] = []

    def record_event(self) -> _Event:
        self.events.append(_Event())
        return self.events[-1]

    def __repr__(self) -> str:
        return f"stream {self.name}"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """on(stream, metadata): the check of a call, as the current stream of a device."""
    monkeypatch.setattr(streams, "_last_use", type(streams._last_use)())

    def check(stream: _Stream, metadata: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        return streams.check_stream(metadata, torch.device("cuda", 0))

    return check


def _batch(workspace: torch.Tensor | None, **parts: Any) -> Any:
    return SimpleNamespace(workspace=workspace, counters=None, **parts)


def test_overlapping_batches_of_a_builder_are_refused(on: Any) -> None:
    first, second, workspace = _Stream("a"), _Stream("b"), torch.zeros(64)
    on(first, _batch(workspace))()
    on(first, _batch(workspace[:8]))()  # one stream: in order
    with pytest.raises(ContractError, match="runs on stream b, but stream a still uses the work"):
        on(second, _batch(workspace.view(torch.int32)))
    first.events[-1].done = True  # the second stream has waited
    on(second, _batch(workspace))()
    with pytest.raises(ContractError, match="make one builder per stream"):
        on(first, _batch(workspace))


def test_builders_and_batches_without_shared_memory_may_overlap(on: Any) -> None:
    first, second = _Stream("a"), _Stream("b")
    one, other = torch.zeros(64), torch.zeros(64)  # both alive: of two addresses
    on(first, _batch(one))()
    on(second, _batch(other))()
    assert on(second, _batch(None)) is None


def test_the_parts_of_a_composite_count(on: Any) -> None:
    first, second, workspace = _Stream("a"), _Stream("b"), torch.zeros(64)
    child = _batch(workspace)
    on(first, _batch(None, decode_metadata=child, prefill_metadata=None))()
    with pytest.raises(ContractError, match="stream a still uses"):
        on(second, child)


def test_what_is_tracked_is_bounded(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MAX_TRACKED", 4)
    kept = [torch.zeros(8) for _ in range(9)]
    for workspace in kept:
        on(_Stream("a"), _batch(workspace))()
    assert len(streams._last_use) == 4
