"""The module-level caches of `ops/triton`: few, and each bounded."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BOUNDED = {"_limits": "one entry per device", "LAUNCHES": "LaunchCache.LIMIT"}


def test_module_caches_are_few_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    call_trace = import_module("call_trace")
    caches = call_trace.module_caches()
    keyed = []
    for line in caches:
        path, _, rest = line.partition(": ")
        name = rest.replace(":", " ").split()[0]
        module = import_module("attnlib." + path.removesuffix(".py").replace("/", "."))
        cached = getattr(module, name)
        if not hasattr(cached, "cache_parameters"):
            assert name in BOUNDED, f"{line}: is it bounded?"
        elif cached.cache_parameters()["maxsize"] is None:
            assert not inspect.signature(cached.__wrapped__).parameters, line
            continue  # one value of the process
        keyed.append(line)
    assert 0 < len(keyed) <= 6, keyed
