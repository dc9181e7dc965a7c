"""vLLM's engine on a CPU without any compiled operation of vLLM.

The Python files of vLLM's CUDA wheel run on a platform of their own ("cpu", but out of tree), whose
layers take their plain torch path. Two C++ operations of vLLM's CPU runner are defined in Python.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch

_KEPT: list[torch.library.Library] = []


def platform() -> str | None:
    """Entry point of `vllm.platform_plugins`."""
    used = os.environ.get("ATTNLIB_TEST_VLLM_CPU") == "1"
    return "vllm_cpu_platform_class.TestCpuPlatform" if used else None


def define_operations() -> None:
    """The C++ operations that the CPU runner calls for a plain decoder."""
    if _KEPT:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        (
            "compute_slot_mapping_kernel_impl(Tensor a, Tensor b, Tensor c, Tensor(a!) d, int e)"
            " -> ()",
            compute_slots,
        ),
    ):
        name = schema.split("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    _KEPT.append(library)  # its definitions are removed with it


def compute_slots(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """slot = block * block_size + offset; -1 behind the batch."""
    tokens = int(query_start_loc[-1])
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = positions[:tokens].long()
    blocks = block_table[request, position // block_size].long()
    slot_mapping.fill_(-1)
    slot_mapping[:tokens] = blocks * block_size + position % block_size


def worker_class() -> Any:
    """vLLM's CPU worker; the size of its cache is what the user says."""
    define_operations()
    from vllm.v1.worker.cpu_worker import CPUWorker

    class TestCpuWorker(CPUWorker):
        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            return nullcontext()

    return TestCpuWorker
