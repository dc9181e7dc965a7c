"""`BackendParity`: pairs of backends as a pytest class, with strict expected failures."""

from __future__ import annotations

import pytest

from attnlib.testing.parity_suite import BackendParity, collect_pairs
from attnlib.testing.suite import ConformanceError
from tests.testing.toy_backend import ToyBackend, ToyImpl, toy_with
from tests.testing.wrong_backends import OffByOneWindow

EXAMPLE = "examples.one_file_backend:OneFileBackend"


class TestPairs(BackendParity):
    """Every ordered pair of three backends that run on a CPU."""

    backends = ("torch", ToyBackend, EXAMPLE)
    device = "cpu"
    only = "mixed,empty_rows,window,lse*,graph_decode"


class TestPairsOfTwoBackends(BackendParity):
    """A backend of two others, by phase and by shared prefix, against each of them."""

    backends = ("prefill:torch,decode:torch", "prefix:torch,suffix:torch")
    against = ("torch",)
    device = "cpu"
    only = "decode,chunked,lse_sinks,fp8,latent"


class TestExpectedFailures(BackendParity):
    """Known failures are listed by pair and call with a reason."""

    backends = (toy_with(OffByOneWindow),)
    against = (ToyBackend,)
    device = "cpu"
    only = "window,soft_cap"
    expected_failures = {
        "toy-to-OffByOneWindow/window": "one key too many",
        "OffByOneWindow-to-OffByOneWindow/window": "one key too many",
    }


def test_a_failure_is_one_error_with_the_command_that_repeats_it() -> None:
    pairs = collect_pairs([toy_with(OffByOneWindow)], [ToyBackend], device="cpu", only="window")
    (test,) = (test for test in pairs if test.id == "toy-to-OffByOneWindow/window")
    with pytest.raises(ConformanceError, match="toy writes, OffByOneWindow reads: M2: ") as found:
        test.run_as_test()
    assert "\nreproduce: attnlib parity tests.testing.toy_backend:ToyBackend " in str(found.value)


def test_what_one_of_the_two_refuses_is_skipped() -> None:
    limited = toy_with(type("Limited", (ToyImpl,), {}), sink=False)
    (own, *_) = collect_pairs([limited], ["torch"], device="cpu", only="sinks")
    with pytest.raises(pytest.skip.Exception, match="unsupported: Limited: "):
        own.run_as_test()
