"""Settings of all tests: Triton is interpreted without a GPU, local tuning tables are ignored, and
torch uses one thread, also in processes that tests start."""

import contextlib
import gc
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

# Modules and collected tests are half a million objects that live to the end. The garbage collector
# would traverse them again and again, for a fifth of the run time.
gc.disable()  # until the tests are collected

# The tensors of the tests are small. With several threads, and above all with several processes,
# most of the time is spent in waiting for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated: set it before a test module imports kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("ATTNLIB_TUNING", "off")

with contextlib.suppress(ImportError):  # tests/hosts runs without it
    from hypothesis import HealthCheck, settings

    # By default, an example that takes more than 0.2 s fails, and so do slow draws.
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter

        from tests.triton_interpreter import speed_up_interpreter

        speed_up_interpreter(interpreter)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in two processes. Chosen files, `-n`, `--pdb`, `-s` and a GPU are not
    affected: workers take seconds to start, hide the terminal, and would share the GPU."""
    option = config.option
    if (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.pluginmanager.hasplugin("xdist")
        and not hasattr(config, "workerinput")
        and (option.numprocesses, option.dist) == (None, "no")
        and not (option.usepdb or option.capture == "no" or torch.cuda.is_available())
    ):
        option.numprocesses, option.dist, option.loadscopereorder = 2, "loadfile", False


LONGEST = (
    "ops/triton/hopper/test_compile.py",
    "ops/triton/test_compile.py",
    "backends/test_triton_conformance.py",
    "ops/triton/test_invariant_attention.py",
    "testing/test_certificate.py",
    "testing/test_checks.py",
    "testing/test_conformance.py",
    "testing/test_plugin.py",
    "hosts/test_vllm_engine.py",
    "hosts/test_vllm_runs.py",
    "hosts/test_vllm_warmup.py",
)
"""Files that begin first, so that no process waits for one of them at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if most := config.getoption("--cases-per-test"):
        left_out = set(items) - set(some_cases(items, most))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    order = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def some_cases(items: Iterable[pytest.Item], most: int) -> list[pytest.Item]:
    """At most so many cases of each test: the first one, the last one and others between them."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = []
    for cases in by_test.values():
        count = min(most, len(cases))
        places = [place * (len(cases) - 1) // max(1, count - 1) for place in range(count)]
        chosen += [cases[place] for place in places]
    return chosen


def pytest_collection_finish() -> None:
    gc.freeze()
    # By default a collection follows 700 new objects, for a twentieth of the time of interpreted
    # kernels.
    gc.set_threshold(100_000)
    gc.enable()


def _check_interpreter() -> None:
    """Refuse an interpreter that fails with the installed numpy, before every kernel does."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from attnlib.backends.triton import interpreter_reasons

        if reasons := interpreter_reasons():
            raise pytest.UsageError("; ".join(reasons))


def pytest_configure(config: pytest.Config) -> None:
    _check_interpreter()
    # nanobind reports objects that are left at exit. After the collections of pytest at its end,
    # whose own clean-up is registered later and runs earlier.
    config.add_cleanup(gc.unfreeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target",
        action="store_true",
        help="compile all cases and tile table entries for all of their targets, not a sample",
    )
    parser.addoption(
        "--compile-table", help="file to which the compile tests append registers and spills"
    )
    parser.addoption(
        "--cases-per-test", type=int, help="of each test with parameters, as many spread cases"
    )
    parser.addoption("--hosts", help="folder that tests/hosts/install.py filled, for -m hosts")
    parser.addoption(
        "--distinct-specs",
        type=int,
        default=2000,
        help="specs and shapes that tests/properties/test_bounded_memory.py uses in one process",
    )
    draws = parser.getgroup("draws", "property tests, tests/properties/test_attention.py")
    draws.addoption("--draws", type=int, help="number of draws; without it, a bounded number")
    draws.addoption("--draw-seed", type=int, default=0, help="seed of the first draw")
    draws.addoption("--draw-backend", default="torch", help="a backend or a pair of backends")
    draws.addoption("--draw-device", help="cpu or cuda (default: a GPU except for torch)")
    draws.addoption(
        "--draws-per-spec", type=int, default=1, help="draws that share a spec (fewer compiles)"
    )
    draws.addoption(
        "--draw-forms", type=int, default=0, help="layouts of each spec on a GPU (fewer compiles)"
    )
    draws.addoption("--draw-processes", type=int, default=1, help="number of processes")
    draws.addoption("--draw-seconds", type=float, help="begin no draw after this time")
    draws.addoption("--draw-report", help="JSON file for the result")
    draws.addoption("--draw-commit", help="commit of attnlib, for copies without history")


@pytest.fixture(autouse=True)
def _observers_end_with_the_test() -> Iterator[None]:
    """ATTNLIB_VALIDATE=2 registers an observer for the rest of the process."""
    yield
    from attnlib.instrumentation import OBSERVERS, STATE_OBSERVERS

    OBSERVERS.clear()
    STATE_OBSERVERS.clear()
