"""Verify the `fla` backend over the kernels of flash-linear-attention in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.backends.fla.interpreted float16 1 ST1,ST8

runs checks in a dtype, with chunked kernels from a number of tokens. It needs fla-core and einops.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from attnlib.testing.conformance import run_conformance
from tests.backends.fla.test_backend import on_cpu


def _interpret() -> None:
    """Let the kernels run without a driver: the first configuration of each in place of a measured
    one, and loops over tensors, whose `.to` two kernels call."""
    from triton.runtime import autotuner, interpreter

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.prune_configs(kwargs)[0]
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def tensors(*bounds: Any) -> Iterator[Any]:
        for number in builtins.range(*map(int, bounds)):
            yield interpreter._implicit_cvt(number)

    autotuner.Autotuner.run = run
    for name in ("chunk_delta_h", "chunk_h"):
        module: Any = importlib.import_module(f"fla.ops.common.{name}")
        module.range = tensors


def main() -> None:
    dtype, chunk_from, *checks = sys.argv[1:]
    _interpret()
    backend = on_cpu(dtype=getattr(torch, dtype), chunk_from=int(chunk_from))
    only = checks[0] if checks else None
    report = run_conformance(backend, device="cpu", quick=True, only=only, against=[], label="fla")
    print(report)
    sys.exit(not report.passed)


if __name__ == "__main__":
    main()
