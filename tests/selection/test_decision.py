"""The decision from facts alone: requests, the order of auto, pairs, and exclusions."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.device import DeviceInfo
from attnlib.errors import UnknownBackendError
from attnlib.selection.decision import auto_order, decide
from attnlib.selection.registration import Registration
from attnlib.selection.request import AUTO, Request, parse_request

SPEC = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)
H200 = DeviceInfo("cuda", 0, (9, 0), name="H200", is_hypothetical=True)
T4 = DeviceInfo("cuda", 0, (7, 5), is_hypothetical=True)
CPU = DeviceInfo("cpu")


def test_a_parsed_request_prints_its_text() -> None:
    known = ("torch", "triton")
    assert parse_request("auto", "x", known).is_auto
    for text in ("torch", "prefill:torch,decode:triton", "auto,-torch,-triton"):
        assert parse_request(text, "x", known).text == text


def test_an_excluded_backend_is_not_probed() -> None:
    probed = []

    def probe(entry: Registration):
        probed.append(entry.name)
        return TorchBackend, []

    entries = [Registration("a", TorchBackend, 2), Registration("b", TorchBackend, 1)]
    report = decide(
        SPEC, CPU, entries, Request("ATTNLIB_BACKEND", excluded=frozenset({"a"})), probe
    )
    assert probed == ["b"] and report.chosen == "b"


@pytest.mark.parametrize(
    ("request_", "probed"),
    [
        (AUTO, ["undeclared", "first", "second"]),
        (Request("argument", "third", "third"), ["third"]),
        (Request("argument", "third", "second", ("prefill", "decode")), ["third", "second"]),
        (Request("x", excluded=frozenset({"second", "undeclared"})), ["first", "third"]),
    ],
)
def test_only_what_decides_is_probed(request_: Request, probed: list[str]) -> None:
    """A backend without a registered priority too: auto asks its class for the place."""
    seen = list[str]()

    def probe(entry: Registration):
        seen.append(entry.name)
        return TorchBackend, ["no package"] if entry.name == "first" else []

    names = {"first": 3, "second": 2, "third": 1, "undeclared": None}
    entries = [Registration(name, TorchBackend, names[name]) for name in names]
    few = decide(SPEC, CPU, entries, request_, probe, only_needed=True)
    assert sorted(seen) == sorted(probed) and len(few.candidates) <= len(entries)
    seen.clear()
    every = decide(SPEC, CPU, entries, request_, probe)
    assert sorted(seen) == sorted(names.keys() - request_.excluded) and every.chosen == few.chosen


def test_deciding_for_hypothetical_hardware() -> None:
    """The decision depends on its arguments only: any machine can decide for an H200 and a T4."""
    entries = [Registration("triton", TritonBackend, 300), Registration("torch", TorchBackend, 100)]

    def probe(entry: Registration):
        return entry.load(), []

    assert decide(SPEC, H200, entries, AUTO, probe).chosen == "triton"
    report = decide(SPEC, T4, entries, AUTO, probe)
    assert report.chosen == "torch" and report.reasons()["triton"] == [
        "compute capability 7.5 is below 8.0"
    ]
    assert decide(SPEC, CPU, entries, AUTO, probe).chosen == "torch", (
        "a CPU can only interpret Triton kernels: by name, never by auto"
    )


@pytest.mark.parametrize(
    "text", ["prefill:torch", "torch,triton", "torch,-triton", "prefill:torch,decode:triton,-torch"]
)
def test_an_invalid_request_is_an_error(text: str) -> None:
    with pytest.raises(UnknownBackendError, match=f"x='{text}' is not a valid request: give one"):
        parse_request(text, "x", ("torch", "triton"))


def test_measured_backends_exchange_places() -> None:
    """A backend that was not measured keeps the place of its priority."""
    entries = [Registration(name, TorchBackend, 10 - place) for place, name in enumerate("abcd")]
    names = [entry.name for entry in auto_order(entries, CPU, ("d", "a"))]
    assert names == ["d", "b", "c", "a"]
    assert [entry.name for entry in auto_order(entries, CPU)] == ["a", "b", "c", "d"]


def test_the_reasons_for_and_against_accepted_backends() -> None:
    entries = [Registration("a", TorchBackend, 2), Registration("b", TorchBackend, 1)]
    entries.append(Registration("c", TorchBackend))

    def probe(entry: Registration):
        return TorchBackend, []

    reasons = {c.name: c.reasons for c in decide(SPEC, CPU, entries, AUTO, probe).candidates}
    assert reasons == {"a": (), "b": ("lower priority",), "c": ("selected only by name",)}
