"""The exam in several processes gives what one process gives."""

import pytest

from attnlib.testing import run_conformance
from attnlib.testing.conformance import make_target
from attnlib.testing.parallel import default_jobs


def _said(report) -> list[tuple[str, str, str]]:
    return [(result.id, result.outcome.value, result.message) for result in report.results]


def test_two_processes_say_what_one_says() -> None:
    chosen = {"device": "cpu", "quick": True, "only": "W2,M*,L*,N3"}
    assert _said(run_conformance("torch", jobs=2, **chosen)) == _said(
        run_conformance("torch", jobs=1, **chosen)
    )


def test_classes_that_cannot_travel_stay_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlib.backends.torch import TorchBackend

    class Local(TorchBackend):
        pass

    for backend, jobs in ((TorchBackend, 4), (Local, 1)):
        target = make_target(backend, device="cpu")
        monkeypatch.setattr(type(target), "on_gpu", True)
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        assert default_jobs(target) == jobs


def test_a_cpu_takes_one_process() -> None:
    assert default_jobs(make_target("torch", device="cpu")) == 1
