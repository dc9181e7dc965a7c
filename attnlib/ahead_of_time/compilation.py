"""Compile the kernels of layers for a GPU of another machine, into a folder that can be shipped."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from attnlib.ahead_of_time.described import (
    DescribedLayer,
    DescribedServer,
    check_described,
    described_layers,
    run_described,
)
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec

__all__ = ["StoredKernel", "compile_kernels"]


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
        folder: gets the kernels and a manifest (`ATTNLIB_KERNELS`), besides those of earlier runs;
            None for Triton's cache.
        processes: that compile at the same time.

    Returns:
        The kernels, sorted by name and key.

    Raises:
        ContractError: a folder of something else.
        ContractError, BackendUnavailableError, UnsupportedConfigError: as `run_described`.
    """
    layers = list(described_layers(specs).values())
    check_described(server, layers)
    if folder is not None:
        _open_folder(folder)
    shares = [(server, layers, folder, (part, processes)) for part in range(processes)]
    parts = _compile_shares(shares)
    kernels = sorted({kernel for part in parts for kernel in part})
    if folder is not None:
        _write_manifest(server, specs, folder, kernels)
    return kernels


def _open_folder(folder: Path) -> None:
    """Make a folder with an empty manifest, or open one of earlier runs, wherever it was then.

    Raises:
        ContractError: a folder of something else.
    """
    from attnlib.ops.triton.launch.kernel_folder import add_to_cache, cache_at
    from attnlib.ops.triton.launch.manifest import Manifest

    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        Manifest().write(folder)
    entries = Manifest.read(folder).entries
    with cache_at(folder):
        add_to_cache(folder, {kernel: None for entry in entries for kernel in entry.needed()})


def _compile_shares(shares: list[tuple[Any, ...]]) -> list[list[StoredKernel]]:
    """Each share in a process of its own, if there are several."""
    if len(shares) == 1:
        return [_compile_share(*shares[0])]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_share, *zip(*shares, strict=True)))


def _compile_share(
    server: DescribedServer,
    layers: list[DescribedLayer],
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
        run_described(server, layers, take, writes_notes=part == 0)
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
    from attnlib.ops.triton.launch.keys import key_facts
    from attnlib.ops.triton.launch.manifest import Entry, Manifest

    chip = server.chip()
    target = target_of(chip)
    entry = Entry(
        device=str(server.device),
        target=f"{target.backend}:{target.arch}",
        chip={name: getattr(chip, name) for name in ("num_sms", "shared_memory")},
        limits=asdict(server.limits),
        specs={kind or "spec": str(spec) for kind, spec in specs.items()},
        facts=key_facts(target),
        kernels=[[kernel.name, kernel.key] for kernel in kernels],
    )
    Manifest.read(folder).add(entry).write(folder)
