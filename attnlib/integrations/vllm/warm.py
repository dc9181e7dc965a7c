"""Kernels are compiled while vLLM starts, not while it serves.

Each group of layers runs the batches of `attnlib.warmup` once, on its own builder and on vLLM's
memory, whose contents do not change. vLLM 0.33 has a registry for this, which its worker runs after
the cache exists and before it captures graphs. vLLM 0.26 has none, and CPU workers do not run it:
then the first call of a layer after its builder exists starts the warm-up, which is a dummy run of
vLLM's. Its builders of a small cache, by which 0.26 measures the memory of graphs, start it first;
those of the cache need no further one.

As for vLLM's own kernels, there is no warm-up with `--enforce-eager` or
`--kernel-config.enable_jit_warmup=False`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.layer.warmup import warmup
from attnlib.ops.dispatch import has_triton
from attnlib.workspace import BatchLimits

__all__ = ["GroupWarmup", "register_kernels", "run_batches"]

_WARM: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
"""Impl, or state layer -> keys and widths of block tables of its warm-ups."""


class GroupWarmup:
    """The warm-up of one group of layers.

    Args:
        builder: of the group's metadata; its `take_layers()` returns vLLM's layers, or none while
            they cannot run. Their impls, or state layers themselves, have `warmup_key(layer)`,
            equal for layers with the same kernels, and `warm_up(layer, builder, shared)`, which
            runs the batches.
        vllm_config: of the engine.

    Attributes:
        pending: whether the kernels are still to be compiled.
    """

    def __init__(self, builder: Any, vllm_config: Any) -> None:
        self._builder = builder
        self.pending = _is_wanted(vllm_config)

    def run(self, *, between_batches: bool) -> None:
        """Compile what is pending; nothing happens while a CUDA graph is captured.

        Args:
            between_batches: no metadata of the group's builder is in use. Otherwise the batches
                are built by others: a builder has one plan and one workspace.
        """
        if not self.pending or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return
        layers: list[Any] = self._builder.take_layers()
        self.pending = not layers
        kinds = {_impl(layer).warmup_key(layer): layer for layer in reversed(layers)}
        for key, layer in kinds.items():
            impl, width = _impl(layer), getattr(self._builder, "block_table_width", None)
            if (key, width) not in (known := _WARM.setdefault(impl, set())):
                impl.warm_up(layer, self._builder, between_batches)
                known.add((key, width))


def run_batches(
    attention: Attention,
    cache: PagedKVCache | None,
    limits: BatchLimits,
    builder: Any,
    max_blocks: int | None,
    device: torch.device,
    more_caches: Sequence[PagedKVCache] = (),
) -> None:
    """`attnlib.warmup` for a layer of a backend that compiles kernels. Arguments as there."""
    if attention.backend.get_name() != "torch":
        given: dict[str, Any] = {"max_blocks": max_blocks, "device": device}
        warmup(attention, cache, limits, builder=builder, more_caches=more_caches, **given)


def register_kernels(device: torch.device) -> None:
    """Let the registry of the runner that is being set up run the warm-ups of all groups, where
    vLLM has one. What the warm-ups read first is read from now on, while vLLM loads the model.

    Args:
        device: of the layers.
    """
    if device.type == "cuda" and has_triton():
        import_module("attnlib.ops.triton.launch.keys").read_ahead()
        limits = import_module("attnlib.ops.triton.heuristics.device").device_limits(device)
        if limits.capability[0] == 9:
            import_module("attnlib.ops.triton.hopper").load_ahead()
    if (kernels := _kernels()) is not None:
        kernels.register_warmup()


def _impl(layer: Any) -> Any:
    return getattr(layer, "impl", layer)


def _is_wanted(vllm_config: Any) -> bool:
    kernels: Any = getattr(vllm_config, "kernel_config", None)
    if hasattr(kernels, "enable_jit_warmup"):
        return bool(kernels.enable_jit_warmup)
    return not vllm_config.model_config.enforce_eager


@functools.cache
def _kernels() -> Any:
    try:
        from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
    except ImportError:  # vLLM 0.26
        return None

    class AttnlibKernels(VllmJitKernel):
        """The kernels of all layers of attnlib; a compile key is a group of layers."""

        CompileKey = GroupWarmup

        def get_warmup_keys(self, vllm_config: Any) -> list[GroupWarmup]:
            """The groups, of drafters too, which are loaded while no registry is active."""
            layers = vllm_config.compilation_config.static_forward_context.values()
            groups = (getattr(_impl(layer), "group_warmup", None) for layer in layers)
            return list(dict.fromkeys(group for group in groups if group is not None))

        def compile(self, compile_key: GroupWarmup) -> None:
            """Run the batches of a group."""
            compile_key.run(between_batches=True)

    return AttnlibKernels()
