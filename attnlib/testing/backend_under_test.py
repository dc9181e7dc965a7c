"""Who sits the exam, where, and with which sizes.

A backend is taken by name, by `module:Class` path or as a class. The base case of its exam is the first of a few
ordinary sizes that it accepts, so a backend for heads of 128 and blocks of 128 in bfloat16 sits the same probes as one
that takes everything.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.capabilities import Sizes
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.testing.case import Case

__all__ = ["BackendUnderTest", "load_backend"]

Backend = type[AttentionBackend]


def load_backend(backend: str | Backend) -> Backend:
    """A backend class from a name, a pair (`prefill:NAME,decode:NAME`), a `module:Class` or `path/to/file.py:Class` path, or itself.

    Raises:
        UnknownBackendError: no backend of that name is registered.
        ContractError: a path that leads to something else.
    """
    if isinstance(backend, type):
        return backend
    if ":" not in backend or backend.lower().startswith(("prefill:", "decode:")):
        from attnlib.selection import load_backend as load_registered

        return load_registered(backend)
    module, _, name = backend.partition(":")
    found: Any = _module_from_file(module) if module.endswith(".py") else import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise ContractError(f"{backend} is {found!r}, not a subclass of attnlib.AttentionBackend")
    return found


def _module_from_file(path: str) -> ModuleType:
    spec = spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise ContractError(f"{path} is no Python file to load a backend from")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the exam's other processes find the module by name
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class BackendUnderTest:
    """A backend under examination.

    Attributes:
        backend: its class.
        label: how the caller named it, for reproduction lines.
        device: where it runs.
        seed: of every random number.
        quick: run the short form of each probe.
        peers: backends to exchange caches with.
    """

    backend: Backend
    label: str
    device: torch.device
    seed: int = 0
    quick: bool = False
    peers: tuple[Backend, ...] = field(default_factory=tuple)

    @property
    def on_gpu(self) -> bool:
        """True on a CUDA device."""
        return self.device.type == "cuda"

    def supports(self, case: Case) -> bool:
        """Whether the backend takes the case."""
        return not self.backend.validate_configuration(case.spec, resolve_device(self.device))

    @cached_property
    def base_case(self) -> Case:
        """The ordinary case that probes vary.

        Raises:
            ContractError: none of the ordinary sizes is accepted; the message gives the reasons for the first.
        """
        heads, dtypes = (32, 16, 64, 128, 256), ("float32", "bfloat16", "float16")
        if self.on_gpu:
            heads, dtypes = (64, 128, 32, 16, 256), ("bfloat16", "float16", "float32")
        layouts = [
            name for name in self.backend.capabilities.kv_cache_layouts or () if name != "ANY"
        ] or ["NHD"]
        groups = self._group_sizes()
        poison = "huge" if self.backend.capabilities.needs_finite_cache else "nan"
        first: Case | None = None
        for dtype, block, head, group in itertools.product(
            dtypes, (16, 32, 64, 128, 256), heads, groups
        ):
            case = Case(
                head_size=head,
                block_size=block,
                dtype=dtype,
                num_kv_heads=2,
                num_heads=2 * group,
                layout=layouts[0],
                poison=poison,
                seed=self.seed,
                needs_lse=self.backend.capabilities.lse is True,
            )
            first = first or case
            if self.supports(case):
                return case
        assert first is not None
        reasons = "; ".join(self.backend.validate_configuration(first.spec, self.device))
        raise ContractError(
            f"backend {self.label} accepts none of the ordinary cases on {self.device}, for instance: {reasons}"
        )

    def _group_sizes(self) -> Sequence[int]:
        declared = self.backend.capabilities.group_sizes
        return [
            group for group in (2, 1, 4, 8) if isinstance(declared, Sizes) and group in declared
        ] or [2]

    def case(self, **changes: Any) -> Case:
        """The base case with some fields changed."""
        return self.base_case.replace(**changes)
