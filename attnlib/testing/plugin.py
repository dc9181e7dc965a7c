"""pytest plugin: `--attnlib-backend=my_pkg:MyBackend` adds the conformance suite to a test run.

pytest loads this module in every environment where attnlib is installed. The module therefore
imports torch and the suite only if the option is given.
"""

from __future__ import annotations

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
    group.addoption("--attnlib-quick", action="store_true", help="run the short form of each check")
    group.addoption(
        "--attnlib-only", metavar="CHECK[/CASE],...", help="run only these checks or cases"
    )
    group.addoption(
        "--attnlib-seed", type=int, default=0, help="seed of all random numbers (default 0)"
    )
    group.addoption(
        "--attnlib-device", help="device to run on (default: the GPU if available, else the CPU)"
    )


class ConformanceItem(pytest.Item):
    """One case of the conformance suite."""

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
    backends = config.getoption("--attnlib-backend")
    if not backends:
        return
    import sys

    from attnlib.errors import AttnlibError
    from attnlib.testing.suite import collect_cases

    if str(config.rootpath) not in sys.path:
        sys.path.insert(0, str(config.rootpath))
    for backend in backends:
        try:
            cases = collect_cases(
                backend,
                device=config.getoption("--attnlib-device"),
                seed=config.getoption("--attnlib-seed"),
                quick=config.getoption("--attnlib-quick"),
                only=config.getoption("--attnlib-only"),
            )
        except AttnlibError as error:
            raise pytest.UsageError(f"--attnlib-backend {backend}: {error}") from None
        for case in cases:
            items.append(
                ConformanceItem.from_parent(session, name=f"{backend}::{case.id}", case=case)
            )
