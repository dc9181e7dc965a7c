"""Several processes give the results of one process."""

import pytest

from attnlib.testing import run_conformance
from attnlib.testing.conformance import make_target
from attnlib.testing.parallel import default_jobs


def _outcomes(report) -> list[tuple[str, str, str]]:
    return [(result.id, result.outcome.value, result.message) for result in report.results]


@pytest.mark.slow
def test_two_processes_give_the_results_of_one() -> None:
    settings = {"device": "cpu", "quick": True, "only": "W2,M*,L*,N3"}
    assert _outcomes(run_conformance("torch", jobs=2, **settings)) == _outcomes(
        run_conformance("torch", jobs=1, **settings)
    )


def test_backends_that_cannot_be_pickled_use_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlib.backends.torch import TorchBackend

    class Local(TorchBackend):
        pass

    for backend, jobs in ((TorchBackend, 4), (Local, 1)):
        target = make_target(backend, device="cpu")
        monkeypatch.setattr(type(target), "on_gpu", True)
        monkeypatch.setattr("attnlib.testing.parallel.processors", lambda: 8)
        assert default_jobs(target) == jobs


def test_a_cpu_uses_one_process() -> None:
    assert default_jobs(make_target("torch", device="cpu")) == 1
