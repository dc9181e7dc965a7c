"""pytest plugin: `--attnlib-backend=my_pkg:MyBackend` adds the conformance suite to a test run,
`--attnlib-against=torch` the comparison of that backend with another.

pytest loads this module in every environment where attnlib is installed. The module therefore
imports torch and the suite only if an option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["ConformanceItem", "pytest_addoption", "pytest_collection_modifyitems"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options."""
    group = parser.getgroup("attnlib", "attnlib conformance")
    group.addoption(
        "--attnlib-backend",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="run the conformance suite on this backend (as in ATTNLIB_BACKEND: a name, "
        "module:Class, file.py:Class or a pair); repeatable",
    )
    group.addoption(
        "--attnlib-against",
        action="append",
        default=[],
        metavar="NAME|all",
        help="instead of the suite, compare the backends of --attnlib-backend (default: all that "
        "are available) with this one: one writes the cache, the other one reads it; repeatable",
    )
    group.addoption("--attnlib-quick", action="store_true", help="run the short form of each check")
    group.addoption(
        "--attnlib-only",
        metavar="CHECK[/CASE],...",
        help="run only these checks or cases, or with --attnlib-against these calls",
    )
    group.addoption(
        "--attnlib-seed", type=int, default=0, help="seed of all random numbers (default 0)"
    )
    group.addoption(
        "--attnlib-device", help="device to run on (default: the GPU if available, else the CPU)"
    )


class ConformanceItem(pytest.Item):
    """One case of the conformance suite or of a pair."""

    def __init__(self, *, case: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case

    def runtest(self) -> None:
        """Run the case."""
        self.case.run_as_test()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message of the failed case instead of a traceback."""
        from attnlib.testing.suite import ConformanceError

        if isinstance(excinfo.value, ConformanceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Location and name of the case."""
        return self.path, None, self.name


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Append the cases to the collected tests."""
    backends, against = (
        config.getoption("--attnlib-backend"),
        config.getoption("--attnlib-against"),
    )
    if not backends and not against:
        return
    import sys

    if str(config.rootpath) not in sys.path:
        sys.path.insert(0, str(config.rootpath))
    found = _pairs(config, backends, against) if against else _suite(config, backends)
    for name, case in found:
        items.append(ConformanceItem.from_parent(session, name=name, case=case))


def _suite(config: pytest.Config, backends: list[str]) -> Iterator[tuple[str, Any]]:
    """The conformance suite of each backend."""
    from attnlib.errors import AttnlibError
    from attnlib.testing.suite import collect_cases

    for backend in backends:
        try:
            cases = collect_cases(
                backend, quick=config.getoption("--attnlib-quick"), **_settings(config)
            )
        except AttnlibError as error:
            raise pytest.UsageError(f"--attnlib-backend {backend}: {error}") from None
        for case in cases:
            yield f"{backend}::{case.id}", case


def _pairs(
    config: pytest.Config, backends: list[str], against: list[str]
) -> Iterator[tuple[str, Any]]:
    """The calls of all pairs."""
    from attnlib.errors import AttnlibError
    from attnlib.testing.parity_suite import collect_pairs

    try:
        pairs = collect_pairs(backends or None, against, **_settings(config))
    except AttnlibError as error:
        raise pytest.UsageError(f"--attnlib-against {' '.join(against)}: {error}") from None
    for pair in pairs:
        yield f"parity::{pair.id}", pair


def _settings(config: pytest.Config) -> dict[str, Any]:
    return {name: config.getoption(f"--attnlib-{name}") for name in ("device", "seed", "only")}
