"""Which implementation of an operation serves a tensor: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["cpu_as_gpu", "has_triton", "named_operation", "operation", "processors", "runs_kernels"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.bool)
_MODULES = {
    "append_kv": "append_kv",
    "attention_scores": "scores",
    "compute_slot_mapping": "slots",
    "context_attention": "context_attention",
    "list_visible_keys": "visible_keys",
    "merge_partial_rows": "merge_states",
    "merge_states": "merge_states",
    "packed_decode": "packed_attention",
    "packed_latent_attention": "packed_latents",
    "packed_prefill": "packed_attention",
    "packed_write": "packed_attention",
    "rotate": "rotary_write",
    "rotate_and_write": "rotary_write",
    "select_keys": "key_indexer",
    "shared_decode": "shared_decode",
    "write_packed_latents": "packed_latents",
}
"""Operations that are not those of a layer, and the modules that hold them."""
_ONLY_IN_TORCH = {"attention_scores"}


def operation(
    module: str, name: str, rows: Tensor, *, in_torch: bool = False
) -> Callable[..., Any]:
    """The operation `name` of `ops.triton` or `ops.torch`, whose signatures are equal.

    Args:
        module: the module that both packages have.
        name: the operation.
        rows: the queries, new keys or mask of the call. Triton serves float16, bfloat16, float32
            and bool on a GPU, torch everything else, also where triton is not installed.
        in_torch: torch serves the call on every device.
    """
    on_gpu = not in_torch and runs_kernels(rows.device)
    served = on_gpu and rows.dtype in _KERNEL_DTYPES and has_triton()
    return _load("triton" if served else "torch", module, name)


def named_operation(package: str, name: str) -> Callable[..., Any] | None:
    """The operation `name` of the package "torch" or "triton" that no attention layer runs
    (`AttentionBackend.get_operation`); None if there is none with this name."""
    if name not in _MODULES or (name in _ONLY_IN_TORCH and package != "torch"):
        return None
    return _load(package, _MODULES[name], name)


_cpu_as_gpu = False


def runs_kernels(device: torch.device) -> bool:
    """Whether operations on tensors of this device are kernels of Triton, if it is installed."""
    return device.type == "cuda" or _cpu_as_gpu


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """Inside, operations on tensors of the CPU are kernels, as on a GPU. They must not run: this is
    for `attnlib.ops.triton.launch.described`."""
    global _cpu_as_gpu
    before, _cpu_as_gpu = _cpu_as_gpu, True
    try:
        yield
    finally:
        _cpu_as_gpu = before


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=64)
def _load(package: str, module: str, name: str) -> Callable[..., Any]:
    # Imported on first use: importing triton takes long, and not every process needs it.
    found: Callable[..., Any] = getattr(import_module(f"attnlib.ops.{package}.{module}"), name)
    return found


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
