"""The conformance kit: prove that any backend computes what the others compute.

In: a backend (name, `module:Class` path or class). Out: a report whose `passed` is a bool. On the way: a batch spec
(`batch_spec`) and a placement of its blocks (`placements`) become seeded tensors with poison in everything unused
(`inputs`, `layouts`); a float64 `oracle` that shares no code with any backend says what is right; a `budget` says how
close is close enough; `probes` ask one question each; `conformance` asks them all. Nothing here needs more than torch,
and every case runs on a CPU.

    attnlib.testing.run_conformance("my_backend").passed
    attnlib.testing.run_parity()                          # everything that runs here, pairwise
    class TestMine(attnlib.testing.BackendConformance): backend = "my_pkg:MyBackend"
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "BackendConformance": "attnlib.testing.suite",
    "Case": "attnlib.testing.case",
    "run_conformance": "attnlib.testing.conformance",
    "run_parity": "attnlib.testing.parity",
}

__all__ = ["BackendConformance", "Case", "run_conformance", "run_parity"]

if TYPE_CHECKING:
    from attnlib.testing.case import Case
    from attnlib.testing.conformance import run_conformance
    from attnlib.testing.parity import run_parity
    from attnlib.testing.suite import BackendConformance


def __getattr__(name: str) -> Any:
    # Late, because the pytest plugin lives in this package and is loaded by every project's pytest.
    if name not in _HOME:
        raise AttributeError(
            f"module 'attnlib.testing' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(import_module(_HOME[name]), name)
