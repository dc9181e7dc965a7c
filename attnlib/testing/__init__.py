"""Conformance suite: test any attention backend against the contract.

The suite takes a backend (name, `module:Class` path or class) and returns a report; `report.passed`
is a bool. Each case of a check is built and evaluated in these steps:

1. `case`, `batch_spec` and `block_placement` define the configuration.
2. `inputs` and `layouts` create seeded tensors. Memory that must not be read holds poison.
3. `runner` calls the backend as an engine does.
4. `oracle` computes the expected result in float64 and `budget` limits the error.

`checks` contains one module for each group of requirements; `conformance` runs them. The suite
needs only torch, and all checks except those for CUDA run on a CPU.

    attnlib.testing.run_conformance("my_backend").passed
    attnlib.testing.run_parity()                          # all pairs of available backends
    class TestMine(attnlib.testing.BackendConformance): backend = "my_pkg:MyBackend"
    class TestPairs(attnlib.testing.BackendParity): against = ("all",)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "BackendConformance": "attnlib.testing.suite",
    "BackendParity": "attnlib.testing.parity_suite",
    "Case": "attnlib.testing.case",
    "run_conformance": "attnlib.testing.conformance",
    "run_parity": "attnlib.testing.parity",
}

__all__ = ["BackendConformance", "BackendParity", "Case", "run_conformance", "run_parity"]

if TYPE_CHECKING:
    from attnlib.testing.case import Case
    from attnlib.testing.conformance import run_conformance
    from attnlib.testing.parity import run_parity
    from attnlib.testing.parity_suite import BackendParity
    from attnlib.testing.suite import BackendConformance


def __getattr__(name: str) -> Any:
    # Imported lazily: every project's pytest loads the plugin in this package at start-up.
    if name not in _MODULES:
        raise AttributeError(
            f"module 'attnlib.testing' has no attribute {name!r}; available: {', '.join(__all__)}"
        )
    return getattr(import_module(_MODULES[name]), name)
