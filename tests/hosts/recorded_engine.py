"""Run cases of `run_engine.py` over the triton backend with launches that are recorded, not run.

    python tests/hosts/recorded_engine.py CASES.json RESULT.json

Tokens are meaningless: no kernel writes anything. The result of a case has the kernels (with
Triton's own keys) of the warm-up, and those that were first needed while the engine served.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

os.environ["ATTNLIB_BACKEND"] = "triton"
import run_engine  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.ops.triton import recorded_launches  # noqa: E402
from tests.ops.triton.stub_driver import RECORDS  # noqa: E402

recorded_launches.install()

from attnlib.backends.triton import TritonBackend  # noqa: E402
from attnlib.integrations.vllm import warm  # noqa: E402
from attnlib.layer import warmup  # noqa: E402
from attnlib.ops import dispatch  # noqa: E402
from attnlib.ops import triton as operations  # noqa: E402

_OWN_LOAD, _OWN_RUN = dispatch._load, warm.GroupWarmup.run
WARMED: set[str] = set()
STARTED_BY: set[str] = set()
"""Functions that started a warm-up."""


def serve_the_cpu() -> None:
    """Let the triton backend and its operations take tensors of the CPU, as those of a GPU."""
    for name in ("unavailable", "supports_combination"):
        setattr(TritonBackend, name, classmethod(lambda cls, *question: []))
    dispatch._load = lambda package, *names: _OWN_LOAD("triton", *names)
    warmup.runs_kernels = lambda device: True
    warm.GroupWarmup.run = recorded_run


def recorded_run(self: Any, **arguments: bool) -> None:
    """`GroupWarmup.run`; its launches go to `WARMED`."""
    before, RECORDS[:] = list(RECORDS), []
    if self.pending:
        STARTED_BY.add(sys._getframe(1).f_code.co_name)
    _OWN_RUN(self, **arguments)
    WARMED.update(record.kernel for record in RECORDS)
    RECORDS[:] = before


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The kernels of one case."""
    for kept in (WARMED, STARTED_BY, RECORDS):
        kept.clear()
    result = _OWN_CASE(case)
    served = {record.kernel for record in RECORDS}
    names = sorted(kernel.split()[0] for kernel in served)
    late = sorted(served - WARMED)
    return {
        "backends": result["backends"], "warmed": len(WARMED), "served": names, "late": late,
        "started_by": sorted(STARTED_BY),
    }  # fmt: skip


_OWN_CASE = run_engine.run


def interpret_other_kernels() -> None:
    """Let the kernels of vLLM's second model runner run in Triton's interpreter. Its own warm-up is
    left out: the interpreter cannot run its kernel for grammars."""
    for module in pkgutil.walk_packages(operations.__path__, f"{operations.__name__}."):
        importlib.import_module(module.name)  # kernels that are made before are not interpreted
    os.environ["TRITON_INTERPRET"] = "1"
    JITFunction.__call__ = lambda self, *args, **kw: InterpretedFunction(self.fn)(*args, **kw)
    importlib.import_module("vllm.v1.worker.gpu.warmup").warmup_kernels = lambda *call: None


if __name__ == "__main__":
    serve_the_cpu()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        interpret_other_kernels()
    run_engine.run = run
    run_engine.main(Path(sys.argv[1]), Path(sys.argv[2]))
