"""One call of a pair: which rule and row a wrong backend is reported with."""

from __future__ import annotations

import pytest
import torch

from attnlib.testing.outcome import Outcome
from attnlib.testing.pair_run import Pair, ParityCell
from tests.testing import wrong_backends
from tests.testing.toy_backend import ToyBackend, ToyImpl, toy_with

CPU = torch.device("cpu")


def run(reader: type[ToyBackend], name: str, *, writes: bool = False) -> ParityCell:
    """The cell of a call in which `reader` reads what the toy wrote, or the other way around."""
    writer, reader = (reader, ToyBackend) if writes else (ToyBackend, reader)
    pair = Pair(writer, reader, CPU, labels=(writer.get_name(), reader.get_name()))
    (case,) = pair.cases(name)
    return pair.run(case)


@pytest.mark.parametrize(
    ("wrong", "name", "text"),
    [
        ("TopLeftCausal", "chunked", "M1: positions: out differs first in row 0 (token 0 of"),
        ("OffByOneWindow", "window", "M2: sliding window: out differs first in row 0"),
        ("IgnoredSoftCap", "soft_cap", "M3: soft cap: out differs first in row 0"),
        ("IgnoredAlibi", "alibi", "M3: ALiBi: out differs first in row 0"),
        ("SinkIgnoredInDecode", "sinks", "M4: sinks: out differs first in row 0"),
        ("BaseTwoLse", "lse", "M5: LSE: lse differs first in row 0 (token 0 of request 0"),
        ("UniformWhenNothingIsVisible", "empty_rows", "M5: rows without keys: out differs first"),
        ("LeavesPaddingRows", "padding", "M6: padding row 3 must be exactly 0"),
        ("IgnoredKScale", "fp8", "M9: scales: out differs first in row 0"),
        ("RotaryPartFirst", "latent", "M12: latents: out differs first in row 0"),
        ("FailsOnEmptyRequests", "empty_rows", "raised "),
    ],
)
def test_a_wrong_reader_is_reported_with_the_rule(wrong: str, name: str, text: str) -> None:
    cell = run(toy_with(getattr(wrong_backends, wrong)), name)
    assert cell.outcome is Outcome.FAIL and cell.message.startswith(text), cell
    assert cell.rule == cell.rule.strip() and " | case: batch=" in cell.message
    assert cell.reproduce == f"attnlib parity toy {wrong} --only {name} --seed 0 --device cpu"


def test_what_the_writer_reads_is_shown_beside_it() -> None:
    cell = run(toy_with(wrong_backends.OffByOneWindow), "window")
    assert " expected, " in cell.message and " from toy reading it" in cell.message
    assert cell.difference > 0.1


@pytest.mark.parametrize(
    ("wrong", "name", "text"),
    [
        ("WritesSlotMinusOne", "empty_rows", "P4: the cache of WritesSlotMinusOne: key_cache"),
        ("PrivateOrder", "decode", "P4: the cache of PrivateOrder: "),
    ],
)
def test_a_wrong_writer_is_reported_as_such(wrong: str, name: str, text: str) -> None:
    """P4: the reader is right; the message names the cache."""
    cell = run(toy_with(getattr(wrong_backends, wrong)), name, writes=True)
    assert cell.message.startswith(text)


def test_a_captured_step_reads_what_another_backend_writes() -> None:
    """M7: the metadata of the capture serves another batch."""
    assert run(ToyBackend, "graph_verify").outcome is Outcome.PASS
    stale = toy_with(ToyImpl, builder=wrong_backends.StaleMetadataBuilder)
    cell = run(stale, "graph_decode")
    assert cell.outcome is Outcome.FAIL and cell.message.startswith("M7: padding rows of a graph: ")


def test_a_reason_names_the_backend_that_refuses() -> None:
    limited = toy_with(type("Limited", (ToyImpl,), {}), sink=False)
    cell = run(limited, "sinks")
    assert cell.outcome is Outcome.UNSUPPORTED and cell.message.startswith("Limited: ")
