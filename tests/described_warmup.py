"""Warm up for an H100 that is described, with a survey, then serve random batches.

    TRITON_CACHE_DIR=FOLDER python -m tests.described_warmup [TOKENS OF A SEQUENCE]

The layer reads a cache in memory of vLLM's form.

Triton compiles with a driver that launches nothing (`described_server`). The last line is a JSON
object: kernels that were found, compiled and launched by the warm-up, the batches that it ran, and
what random batches needed first.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from attnlib.ahead_of_time import DescribedServer
from attnlib.cache.storage import PagedKVCache
from attnlib.device import resolve_device
from attnlib.layer import warmup
from attnlib.ops.dispatch import cpu_as_gpu
from attnlib.ops.triton.heuristics.device import limits_of_cpu
from attnlib.ops.triton.launch import survey
from attnlib.ops.triton.launch.compilations import compiled_kernels
from tests.described_server import LIMITS, SPEC, Driver, Server, batch_of

LAUNCHED: set[str] = set()


class RecordingDriver(Driver):
    """Notes what is launched."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: LAUNCHED.add(source.name)


def main() -> None:
    """Warm up and serve."""
    triton.runtime.driver.set_active(RecordingDriver())
    survey.can_survey = lambda device: True  # also tensors of the CPU
    limits = replace(LIMITS, max_seq_len=int((sys.argv[1:] or [LIMITS.max_seq_len])[0]))
    chip = DescribedServer(resolve_device("H100"), limits).chip()
    batches, own_run = [], warmup.run_forms
    warmup.run_forms = lambda *call: (batches.append(call[3]), own_run(*call))
    with cpu_as_gpu(), limits_of_cpu(chip), torch.no_grad():
        server, draw = Server(), random.Random(0)
        memory = torch.zeros(
            40, SPEC.block_size, SPEC.num_kv_heads, 2 * SPEC.head_size, dtype=SPEC.dtype
        )
        server.cache = PagedKVCache.from_vllm(memory.transpose(1, 2), head_size=SPEC.head_size)
        server.builder = server.layer.backend.make_builder(SPEC, memory.device, limits=limits)
        with compiled_kernels() as new:
            warmup.warmup(server.layer, server.cache, limits, builder=server.builder)
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
