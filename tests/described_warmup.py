"""Warm up for an H100 that is described, with a survey, then serve random batches.

    TRITON_CACHE_DIR=FOLDER python -m tests.described_warmup

Triton compiles with a driver that launches nothing (`described_server`). The last line is a JSON
object: kernels that were found, compiled and launched by the warm-up, the batches that it ran, and
what random batches needed first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch
import triton

from attnlib.layer import warmup
from attnlib.ops.dispatch import cpu_as_gpu
from attnlib.ops.triton.heuristics.device import limits_of_cpu
from attnlib.ops.triton.launch import survey
from attnlib.ops.triton.launch.compilations import compiled_kernels
from tests.described_server import H100, LIMITS, Driver, Server, batch_of

LAUNCHED: set[str] = set()


class RecordingDriver(Driver):
    """Notes what is launched."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: LAUNCHED.add(source.name)


def main() -> None:
    """Warm up and serve."""
    triton.runtime.driver.set_active(RecordingDriver())
    survey.can_survey = lambda device: True  # also tensors of the CPU
    warmup.kernel_facts = lambda *arguments: "of one layer"
    batches, own_run = [], warmup._run
    warmup._run = lambda *call: (batches.append(call[3]), own_run(*call))
    with cpu_as_gpu(), limits_of_cpu(H100), torch.no_grad():
        server, draw = Server(), random.Random(0)
        with compiled_kernels() as new:
            warmup.warmup(server.layer, server.cache, LIMITS, builder=server.builder)
        launched = sorted(LAUNCHED)
        with compiled_kernels() as late:
            for _ in range(80):
                server.step(batch_of(draw))
    found = [kernel.name for kernel in new if kernel.is_found]
    compiled = [kernel.name for kernel in new if not kernel.is_found]
    print(
        json.dumps(
            {
                "found": sorted(found),
                "compiled": sorted(compiled),
                "launched": launched,
                "batches": len(batches),
                "late": [kernel.name for kernel in late],
            }  # fmt: skip
        )
    )


if __name__ == "__main__":
    main()
