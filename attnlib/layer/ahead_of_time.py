"""The kernels that layers need on a GPU of another machine, without that GPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.layer.attention import Attention
from attnlib.layer.warmup import warmup
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = [
    "StoredKernel",
    "check_described",
    "DescribedServer",
    "compile_kernels",
    "needed_kernels",
    "run_described",
]

_BLOCKS = 2
"""Blocks of a cache: no kernel depends on their number."""


@dataclass(frozen=True)
class DescribedServer:
    """A server on another machine.

    Attributes:
        device: its GPU.
        limits: its largest batch.
        num_sms: multiprocessors of the GPU; None for those of its model.
    """

    device: DeviceInfo
    limits: BatchLimits
    num_sms: int | None = None

    def chip(self) -> Any:
        """`DeviceLimits` of the GPU, with the tiles that were tuned for a chip of its name.

        Raises:
            ContractError: a GPU whose numbers are not known.
        """
        from attnlib.backends.triton.chips import described_limits
        from attnlib.backends.triton.tune import tuned_tiles

        limits = described_limits(self.device, self.num_sms)
        return replace(limits, tuned=tuned_tiles(replace(self.device, is_hypothetical=False)))


def run_described(
    server: DescribedServer,
    specs: Iterable[AttentionSpec],
    take: Callable[[Any, Callable[[], Any]], None],
) -> None:
    """Run `warmup` for layers on a described GPU: kernels are chosen as there, nothing is launched.

    Args:
        server: where the layers will run.
        specs: of the layers.
        take: `take(kernel, compile)` for each `NeededKernel`, once; see
            `attnlib.ops.triton.launch.described`.

    Raises:
        ContractError: a GPU whose numbers are not known, or a spec with a score function, whose
            tensors are not known.
        BackendUnavailableError: this process cannot compile kernels.
        UnsupportedConfigError: the `triton` backend does not support a spec on that GPU.
    """
    specs = list(specs)
    check_described(server, specs)
    from attnlib.backends.triton.described import DescribedTritonBackend
    from attnlib.ops.triton.launch.described import described_gpu

    with described_gpu(server.chip(), take):
        for spec in specs:
            layer = _new_layer(spec, DescribedTritonBackend)
            cache = PagedKVCache.allocate(spec, _BLOCKS, "cpu") if spec.is_paged else None
            warmup(layer, cache, server.limits, device="cpu")


def check_described(server: DescribedServer, specs: Iterable[AttentionSpec]) -> None:
    """Refuse what `run_described` refuses, except in a process that cannot compile."""
    for spec in specs:
        get_attn_backend(spec, "triton", server.device)  # raises with the reasons
        if spec.score_function is not None:
            raise ContractError(
                "kernels of a layer with a score function cannot be compiled without its tensors: "
                "run attnlib.warmup on the layer"
            )
    server.chip()


def _new_layer(spec: AttentionSpec, backend: Any) -> Attention:
    slopes = torch.ones(spec.num_heads) if spec.has_alibi else None
    sinks = torch.zeros(spec.num_heads) if spec.has_sink else None
    return Attention(spec, backend=backend, alibi_slopes=slopes, sinks=sinks, device="cpu")


class StoredKernel(NamedTuple):
    """A kernel that `compile_kernels` made sure of.

    Attributes:
        name: of the kernel function.
        key: its name in Triton's cache.
        seconds: that it took to compile; 0 for one that was there before.
    """

    name: str
    key: str
    seconds: float


def needed_kernels(server: DescribedServer, specs: Iterable[AttentionSpec]) -> list[Any]:
    """The kernels that layers need, as `NeededKernel`; nothing is compiled. Errors as
    `run_described`."""
    found: list[Any] = []
    run_described(server, specs, lambda kernel, compile: found.append(kernel))
    return list(dict.fromkeys(found))


def compile_kernels(
    server: DescribedServer,
    specs: Mapping[str, AttentionSpec],
    folder: Path | None = None,
    processes: int = 1,
) -> list[StoredKernel]:
    """Compile the kernels that the layers of a server need, on a machine without its GPU.

    Args:
        server: where the layers will run.
        specs: kind of layer -> spec.
        folder: gets the kernels and a manifest (`ATTNLIB_KERNELS`); None for Triton's cache.
        processes: that compile at the same time.

    Returns:
        The kernels, sorted by name and key.

    Raises:
        ContractError, BackendUnavailableError, UnsupportedConfigError: as `run_described`.
    """
    layers = list(specs.values())
    check_described(server, layers)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    shares = [(server, layers, folder, (part, processes)) for part in range(processes)]
    parts = _compile_shares(shares)
    kernels = sorted({kernel for part in parts for kernel in part})
    if folder is not None:
        _write_manifest(server, specs, folder, kernels)
    return kernels


def _compile_shares(shares: list[tuple[Any, ...]]) -> list[list[StoredKernel]]:
    """Each share in a process of its own, if there are several."""
    if len(shares) == 1:
        return [_compile_share(*shares[0])]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_share, *zip(*shares, strict=True)))


def _compile_share(
    server: DescribedServer,
    specs: list[AttentionSpec],
    folder: Path | None,
    share: tuple[int, int],
) -> list[StoredKernel]:
    """Compile the kernels of one process. Each process finds all of them and compiles its own."""
    from attnlib.ops.triton.launch.kernel_folder import cache_at, is_stored, write_launcher

    part, parts = share
    compiled: list[StoredKernel] = []

    def take(kernel: Any, compile: Callable[[], Any]) -> None:
        if int(kernel.key[:8], 16) % parts != part:
            return
        started, was_there = time.perf_counter(), is_stored(kernel)
        made = compile()
        if made.hash != kernel.key:
            raise ContractError(
                f"this Triton stores {kernel.name} under another key than attnlib expects: use "
                "Triton 3.6 to 3.9"
            )
        seconds = 0.0 if was_there else time.perf_counter() - started
        compiled.append(StoredKernel(kernel.name, kernel.key, round(seconds, 2)))

    with cache_at(folder):
        run_described(server, specs, take)
        if part == 0:
            write_launcher()
    return compiled


def _write_manifest(
    server: DescribedServer,
    specs: Mapping[str, AttentionSpec],
    folder: Path,
    kernels: Iterable[StoredKernel],
) -> None:
    from attnlib.ops.triton.launch.described import target_of
    from attnlib.ops.triton.launch.kernel_folder import VERSION, Manifest
    from attnlib.ops.triton.launch.keys import key_facts

    chip = server.chip()
    numbers = {name: getattr(chip, name) for name in ("num_sms", "shared_memory")}
    Manifest(
        VERSION,
        device=str(server.device),
        chip={**numbers, "capability": list(chip.capability)},
        limits=asdict(server.limits),
        specs={kind or "spec": str(spec) for kind, spec in specs.items()},
        facts=key_facts(target_of(chip)),
        kernels=[[kernel.name, kernel.key] for kernel in kernels],
    ).write(folder)
