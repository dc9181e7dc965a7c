"""pytest plugin: `pytest --attnlib-backend=my_pkg:MyBackend` adds the whole exam to the run, one test per case.

pytest loads this module in every run of every project where attnlib is installed, so nothing is imported before the
option is given.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["ConformanceItem", "pytest_addoption", "pytest_collection_modifyitems"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("attnlib", "attnlib conformance")
    group.addoption(
        "--attnlib-backend",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="examine this attention backend (a name, module:Class or file.py:Class); may be given more than once",
    )
    group.addoption("--attnlib-quick", action="store_true", help="the short form of each probe")
    group.addoption("--attnlib-only", metavar="PROBE[/CASE],...", help="these probes or cases only")
    group.addoption(
        "--attnlib-seed", type=int, default=0, help="of every random number (default 0)"
    )
    group.addoption(
        "--attnlib-device", help="where to run (default: a GPU where torch sees one, else the CPU)"
    )


class ConformanceItem(pytest.Item):
    """One case of the exam."""

    def __init__(self, *, case: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case

    def runtest(self) -> None:
        """Run the case."""
        self.case.run_as_test()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The probe's message instead of a traceback through the kit."""
        from attnlib.testing.suite import ConformanceError

        if isinstance(excinfo.value, ConformanceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where and what."""
        return self.path, None, self.name


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the exam's cases behind the project's own tests."""
    backends = config.getoption("--attnlib-backend")
    if not backends:
        return
    import sys

    from attnlib.testing.suite import collect_cases

    if str(config.rootpath) not in sys.path:
        sys.path.insert(0, str(config.rootpath))
    for backend in backends:
        cases = collect_cases(
            backend,
            device=config.getoption("--attnlib-device"),
            seed=config.getoption("--attnlib-seed"),
            quick=config.getoption("--attnlib-quick"),
            only=config.getoption("--attnlib-only"),
        )
        for case in cases:
            items.append(
                ConformanceItem.from_parent(session, name=f"{backend}::{case.id}", case=case)
            )
