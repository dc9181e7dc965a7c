"""The backend under test: how to load it, where it runs and which sizes the checks use.

A backend is given by name, as a `module:Class` path or as a class. The checks vary a base case: the
first of a list of common sizes that the backend supports. A backend that supports only head size
128, block size 128 and bfloat16 therefore runs the same checks as one without restrictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.interface import check_backend_interface, serves_attention, serves_states
from attnlib.capabilities import Sizes
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError, ContractError
from attnlib.testing.case import Case

__all__ = ["BackendUnderTest", "load_backend", "refuse_unavailable"]

Backend = type[AttentionBackend]


def load_backend(backend: str | Backend) -> Backend:
    """Load a backend class.

    Args:
        backend: a registered name, a pair (`prefill:NAME,decode:NAME`), a `module:Class` or
            `path/to/file.py:Class` path, or the class itself.

    Raises:
        UnknownBackendError: no backend is registered under the name, or there is no such module,
            file or class.
        BackendUnavailableError: it cannot be imported.
        RegistrationError: the class does not fit the interface, as `register_backend` checks it.
    """
    from attnlib.selection import load_backend as load_requested

    if isinstance(backend, str):
        return load_requested(backend)
    check_backend_interface(backend, getattr(backend, "__qualname__", repr(backend)))
    return backend


def refuse_unavailable(backend: Backend, device: torch.device) -> None:
    """Refuse a backend that cannot run on a device.

    Raises:
        BackendUnavailableError: its package, compiler or device is not available; the message
            names the next action.
    """
    info = resolve_device(device)
    if missing := [*info.unavailable_reasons, *backend.unavailable(info)]:
        raise BackendUnavailableError(
            f"{backend.get_name()} is unavailable on {device}: {'; '.join(missing)}"
        )


@dataclass(frozen=True)
class BackendUnderTest:
    """A backend and the settings of one conformance run.

    Attributes:
        backend: the backend class.
        label: the name given by the caller, for reproduction lines.
        device: the device to run on.
        seed: seed of all random numbers.
        quick: run the short form of each check.
        peers: backends to exchange caches with.
        score: path of a score function that check S1 tests instead of its own; None for its own.
        kv_format: name or path of the KV format that KV1 to KV14 test; None for other checks.
        partner: a second backend that must support the base case as well, for comparisons of two.
    """

    backend: Backend
    label: str
    device: torch.device
    seed: int = 0
    quick: bool = False
    peers: tuple[Backend, ...] = field(default_factory=tuple)
    score: str | None = None
    kv_format: str | None = None
    partner: Backend | None = None

    @property
    def on_gpu(self) -> bool:
        """True on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that the backend serves: "attention", "state"."""
        serves = {"attention": serves_attention, "state": serves_states}
        return tuple(kind for kind, does in serves.items() if does(self.backend))

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the state layers that the checks run."""
        preferred = (torch.float32, torch.bfloat16, torch.float16)
        if self.on_gpu:
            preferred = (torch.bfloat16, torch.float16, torch.float32)
        declared = self.backend.state_capabilities.dtypes or ()
        return next((dtype for dtype in preferred if dtype in declared), preferred[0])

    def supports(self, case: Case) -> bool:
        """True if the backend, and its partner, declare support for the case."""
        info = resolve_device(self.device)
        return not any(
            backend.validate_configuration(case.spec, info) for backend in self._backends
        )

    @property
    def _backends(self) -> tuple[Backend, ...]:
        return (self.backend,) if self.partner is None else (self.backend, self.partner)

    def _first_layout(self) -> str:
        """The first layout that the backend declares and its partner supports."""
        first, *others = (backend.capabilities.kv_cache_layouts or () for backend in self._backends)
        declared = [name for name in first if name != "ANY"]
        common = [
            name for name in declared if all(name in names or "ANY" in names for names in others)
        ]
        return (common or declared or ["NHD"])[0]

    @cached_property
    def base_case(self) -> Case:
        """The case that the checks vary.

        Raises:
            ContractError: the backend supports none of the common sizes; the message gives the
                reasons for the first of them.
        """
        head_sizes, dtypes = (32, 16, 64, 128, 256), ("float32", "bfloat16", "float16")
        if self.on_gpu:
            head_sizes, dtypes = (64, 128, 32, 16, 256), ("bfloat16", "float16", "float32")
        layout = self._first_layout()
        finite = any(backend.capabilities.needs_finite_cache for backend in self._backends)
        poison = "huge" if finite else "nan"
        first: Case | None = None
        for dtype, block_size, head_size, group_size in itertools.product(
            dtypes, (16, 32, 64, 128, 256), head_sizes, self._group_sizes()
        ):
            case = Case(
                head_size=head_size,
                block_size=block_size,
                dtype=dtype,
                num_kv_heads=2,
                num_heads=2 * group_size,
                layout=layout,
                poison=poison,
                seed=self.seed,
                needs_lse=all(backend.capabilities.lse is True for backend in self._backends),
            )
            first = first or case
            if self.supports(case):
                return case
        assert first is not None
        for dtype, block_size in itertools.product(dtypes, (16, 32, 64, 128, 256)):
            # A backend over latent caches only; DeepSeek's sizes.
            case = first.replace(
                head_size=576,
                head_size_v=512,
                num_heads=16,
                num_kv_heads=1,
                block_size=block_size,
                dtype=dtype,
                layout="ALIASED",
                use_mla=True,
            )
            if self.supports(case):
                return case
        reasons = "; ".join(self.backend.validate_configuration(first.spec, self.device))
        raise ContractError(
            f"backend {self.label} supports none of the common cases on {self.device}; "
            f"reasons for the first one: {reasons}"
        )

    def _group_sizes(self) -> Sequence[int]:
        declared = self.backend.capabilities.group_sizes
        return [
            group for group in (2, 1, 4, 8) if isinstance(declared, Sizes) and group in declared
        ] or [2]

    def case(self, **changes: Any) -> Case:
        """The base case with some fields changed."""
        if self.base_case.use_mla and {"head_size", "num_kv_heads"} & changes.keys():
            # Other sizes are those of a layer without latents, unless the case says otherwise.
            changes = {"use_mla": False, "layout": "NHD", "head_size_v": None, **changes}
        return self.base_case.replace(**changes)
