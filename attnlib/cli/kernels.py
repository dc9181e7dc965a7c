"""Which compiled kernels there are: lines of `attnlib explain` and `attnlib doctor`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnlib import env
from attnlib.ahead_of_time import (
    DescribedServer,
    check_described,
    described_layers,
    needed_kernels,
)
from attnlib.spec import AttentionSpec

__all__ = ["KernelsOfSpec", "kernel_facts", "kernels_of"]


@dataclass(frozen=True)
class KernelsOfSpec:
    """The kernels of one kind of layer.

    Attributes:
        where: the folder, or Triton's cache.
        needed: number of kernels.
        missing: kernel function -> number of kernels that are not there.
        differences: why no kernel of the folder is found here.
    """

    where: str
    needed: int
    missing: dict[str, int]
    differences: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        absent = sum(self.missing.values())
        text = f"{self.needed - absent} of {self.needed} kernels are in {self.where}"
        if self.missing:
            names = (f"{name} ({number})" for name, number in self.missing.items())
            text += f"; missing: {', '.join(names)}"
        return "; ".join([text, *self.differences])


def kernels_of(
    server: DescribedServer, specs: Mapping[str, AttentionSpec], folder: str
) -> dict[str, KernelsOfSpec]:
    """The kernels of each kind of layer, in a folder, or for "" in Triton's cache."""
    layers = described_layers(specs)
    check_described(server, layers.values())
    if not specs:
        return {}
    from attnlib.ops.triton.launch.described import target_of
    from attnlib.ops.triton.launch.kernel_folder import cache_folder, is_stored
    from attnlib.ops.triton.launch.manifest import Manifest

    path = Path(folder) if folder else None
    target, differences = target_of(server.chip()), []
    if path is not None:
        differences = Manifest.read(path).differences(target)
    where = str(path or f"Triton's cache, {cache_folder()}")
    found = {}
    for kind, layer in layers.items():
        needed = needed_kernels(server, [layer])
        missing = Counter(kernel.name for kernel in needed if not is_stored(kernel, path))
        found[kind] = KernelsOfSpec(where, len(needed), dict(missing), differences)
    return found


def kernel_facts() -> dict[str, str]:
    """Where compiled kernels are, for `attnlib doctor`. Imports triton only for a folder."""
    found = {"Triton's cache": os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache (default)")}
    if name := env.read("ATTNLIB_KERNELS"):
        found["ATTNLIB_KERNELS"] = _folder_state(Path(name).expanduser())
    return found


def _folder_state(folder: Path) -> str:
    """The kernels of a folder by GPU, and why this installation finds none of them."""
    from triton.backends.compiler import GPUTarget

    from attnlib.ops.triton.launch.kernel_folder import is_stored
    from attnlib.ops.triton.launch.manifest import Manifest

    manifest, lines = Manifest.read(folder), [str(folder)]
    for entry in manifest.entries:
        present = sum(is_stored(kernel, folder) for kernel in entry.needed())
        lines.append(f"{present} of {len(entry.kernels)} kernels for {entry.device}")
        backend, arch = entry.target.split(":")
        lines += [
            f"not used: {one}" for one in entry.differences(GPUTarget(backend, int(arch), 32))
        ]
    return "; ".join(lines)
