"""The backends of a run: by name, by path, or by name with settings, and why some cannot run.

`flash_attn[fa_version=4]` and `flashinfer[prefill_backend=fa2;tensor_cores=0]` bind settings as
registration does, so that one table can compare several kernels of one package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.loading import configured
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.selection.registry import availability, registrations
from attnlib.selection.request import has_role
from attnlib.testing.backend_under_test import load_backend

__all__ = [
    "PRIMARY",
    "BenchBackend",
    "base_name",
    "find_backends",
    "is_baseline",
    "split_names",
    "unavailable_backends",
]

PRIMARY = "triton"
"""The backend that tables and figures compare with the best of the others."""

_NAME = re.compile(r"(?P<path>[^\[\]]+)(?:\[(?P<settings>[^\[\]]*)\])?")


@dataclass(frozen=True)
class BenchBackend:
    """One backend under its name in the table.

    Attributes:
        label: the name as it was requested, settings included.
        backend: its class; None if it cannot be loaded.
        unavailable_reasons: why it cannot run here; empty if it can.
    """

    label: str
    backend: type[AttentionBackend] | None
    unavailable_reasons: tuple[str, ...] = ()


def base_name(label: str) -> str:
    """A label without its settings: "triton" for `triton[kernels=portable]`."""
    return label.partition("[")[0]


def is_baseline(label: str) -> bool:
    """True if `PRIMARY` is compared with this backend: not itself, and not `torch`."""
    return base_name(label) not in (PRIMARY, "torch")


def split_names(text: str) -> list[str]:
    """Names separated by commas; commas within brackets, and the one of a pair such as
    `prefill:NAME,decode:NAME`, do not separate."""
    names: list[str] = []
    for part in (name.strip() for name in re.split(r",(?![^\[]*\])", text)):
        opened = bool(names) and has_role(names[-1]) and "," not in names[-1]
        if opened and has_role(part):
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    return names


def find_backends(names: list[str] | None, device: torch.device) -> list[BenchBackend]:
    """The backends of a run, in the order of `names`.

    Args:
        names: requests in the syntax of ATTNLIB_BACKEND, with or without settings. None means all
            that can run on the device except, on a GPU, `torch` (the slow reference) and, on a CPU,
            `triton` (which is interpreted there).
        device: where they run.

    Raises:
        ContractError: settings that do not parse.
        UnknownBackendError: no backend has this name, or there is no class at a path.
        BackendUnavailableError: the module of a path cannot be imported.
    """
    if names is None:
        left_out = ("torch",) if device.type == "cuda" else (PRIMARY,)
        found = [
            one
            for one in (_registered(name, device) for name in registrations())
            if not one.unavailable_reasons and one.label not in left_out
        ]
        return sorted(found, key=lambda one: (one.label != PRIMARY, one.label == "torch"))
    return [_named(name, device) for name in dict.fromkeys(names)]


def unavailable_backends(device: torch.device) -> list[BenchBackend]:
    """Registered backends that cannot run here, with the reasons."""
    found = [_registered(name, device) for name in registrations()]
    return [one for one in found if one.unavailable_reasons]


def _registered(name: str, device: torch.device) -> BenchBackend:
    backend, reasons = availability(registrations()[name], resolve_device(device))
    return BenchBackend(name, backend, tuple(reasons))


def _named(text: str, device: torch.device) -> BenchBackend:
    match = _NAME.fullmatch(text)
    if match is None:
        raise ContractError(
            f"--backends {text!r} does not parse: write NAME, module:Class, path/to/file.py:Class, "
            "or one of these with [KEY=VALUE;...]"
        )
    path, settings = match["path"].strip(), _settings(text, match["settings"] or "")
    if path.lower() in registrations():
        found = _registered(path.lower(), device)
        backend, reasons, label = found.backend, found.unavailable_reasons, text.lower()
    else:
        backend, label = load_backend(path), text
        reasons = tuple(backend.unavailable(resolve_device(device)))
    return BenchBackend(label, None if backend is None else configured(backend, settings), reasons)


def _settings(text: str, settings: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in settings.split(";"))):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ContractError(
                f"--backends {text!r}: {setting!r} is not a setting; write KEY=VALUE, separated by "
                "';'"
            )
        found[key.strip()] = int(value) if value.strip().lstrip("-").isdigit() else value.strip()
    return found
