"""Who takes part: backends by name, by path, or by name with settings, and why some do not.

`flash_attn[fa_version=4]` and `flashinfer[prefill_backend=fa2;tensor_cores=0]` bind settings as registration does, so two
generations of one package can stand in one table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.device import resolve_device
from attnlib.errors import AttnlibError, ContractError
from attnlib.selection.availability import availability
from attnlib.selection.configured import configured
from attnlib.selection.registry import registrations
from attnlib.testing.backend_under_test import load_backend

__all__ = ["HOUSE", "OURS", "Contender", "absent", "base_name", "find_contenders", "split_names"]

OURS = "triton"
HOUSE = (OURS, "torch")
"""Backends that are no peers: the one that is measured, and the reference."""

_NAME = re.compile(r"(?P<path>[^\[\]]+)(?:\[(?P<settings>[^\[\]]*)\])?")


@dataclass(frozen=True)
class Contender:
    """One backend under the name that it has in the table.

    Attributes:
        label: as it was asked for; backend: its class, None where it cannot be loaded.
        absent: why it cannot run here at all; empty when it can.
    """

    label: str
    backend: type[AttentionBackend] | None
    absent: tuple[str, ...] = ()


def base_name(label: str) -> str:
    """A label without its settings: `triton[...]` is `triton` still, and no peer."""
    return label.partition("[")[0]


def split_names(text: str) -> list[str]:
    """Names separated by commas; commas within brackets do not separate."""
    return [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]


def find_contenders(names: list[str] | None, device: torch.device) -> list[Contender]:
    """The backends of a run, in the order asked for.

    Args:
        names: None means every backend that can run on the device, without what would measure nothing of interest unless it is named: on a GPU
            `torch`, the slow reference, and elsewhere `triton`, which is interpreted there.

    Raises:
        ContractError, UnknownBackendError: a name that leads to no backend.
    """
    if names is None:
        found = [_registered(name, device) for name in registrations()]
        left_out = ("torch",) if device.type == "cuda" else (OURS,)
        able = [
            contender
            for contender in found
            if not contender.absent and contender.label not in left_out
        ]
        return sorted(
            able, key=lambda contender: (contender.label != OURS, contender.label == "torch")
        )
    return [_named(name, device) for name in dict.fromkeys(names)]


def absent(device: torch.device) -> list[Contender]:
    """Known backends that cannot run here: a comparison should say who is missing."""
    return [found for name in registrations() if (found := _registered(name, device)).absent]


def _registered(name: str, device: torch.device) -> Contender:
    backend, missing = availability(registrations()[name], resolve_device(device))
    return Contender(name, backend, tuple(missing))


def _named(text: str, device: torch.device) -> Contender:
    match = _NAME.fullmatch(text)
    if match is None:
        raise ContractError(
            f"--backends {text!r} does not parse: write NAME, module:Class, or NAME[KEY=VALUE;...]"
        )
    path, settings = match["path"].strip(), _settings(text, match["settings"] or "")
    if path.lower() in registrations():
        found = _registered(path.lower(), device)
        backend, reasons, label = found.backend, found.absent, text.lower()
    else:
        backend, reasons, label = _loaded(path), (), text
    return Contender(label, None if backend is None else configured(backend, settings), reasons)


def _loaded(path: str) -> type[AttentionBackend]:
    try:
        return load_backend(path)
    except AttnlibError:
        raise
    except (ImportError, AttributeError) as error:
        raise ContractError(f"--backends {path}: {type(error).__name__}: {error}") from error


def _settings(text: str, settings: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in settings.split(";"))):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ContractError(
                f"--backends {text!r}: {setting!r} is no setting; write KEY=VALUE, several separated by ';'"
            )
        found[key.strip()] = int(value) if value.strip().lstrip("-").isdigit() else value.strip()
    return found
