"""Where a chip's tuning table lies, and reading it: once, when somebody first asks, never at import.

A table that cannot be used is one warning and no table: what was measured elsewhere, or what is damaged, must never stop a program that ran without.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

from attnlib import env
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.tuning.table import Tuning, parse_tuning

__all__ = ["chip_name", "forget", "generation", "table_path", "tuning_for"]

_read: dict[tuple[str, str], Tuning | None] = {}
_generation = 0


def chip_name(device: DeviceInfo) -> str | None:
    """What a table calls the chip: the driver's name of it, "cpu" for a CPU, None where there is no chip to measure on."""
    if device.type == "cpu":
        return "cpu"
    return (
        device.name
        if device.type == "cuda"
        and device.capability
        and device.name
        and not device.is_hypothetical
        else None
    )


def table_path(chip: str) -> Path | None:
    """The file of a chip's table, whether or not it exists: ATTNLIB_TUNING, else a file of the user's cache folder; None when switched off."""
    wish = env.read("ATTNLIB_TUNING")
    if wish.lower() == "off":
        return None
    if wish:
        return Path(wish).expanduser()
    slug = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    return Path("~/.cache/attnlib/tuning").expanduser() / f"{slug}.json"


def tuning_for(device: DeviceInfo) -> Tuning | None:
    """The table for a device, or None: without one, with one that cannot be used (one warning says why), and when switched off."""
    chip = chip_name(device)
    if chip is None:
        return None
    key = (env.read("ATTNLIB_TUNING"), chip)
    if key not in _read:
        _read[key] = _load(chip)
    return _read[key]


def forget() -> None:
    """Read tables anew when they are asked for next; for whoever has just written one."""
    global _generation
    _read.clear()
    _generation += 1


def generation() -> int:
    """A number that changes when tables may have: part of the key of whatever is kept of a choice."""
    return _generation


def _load(chip: str) -> Tuning | None:
    path: Path | None = None
    try:
        path = table_path(chip)
        if path is None or (not path.exists() and not env.read("ATTNLIB_TUNING")):
            return None
        tuning = parse_tuning(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # ContractError is a ValueError; no home folder is a RuntimeError
        _warn(
            str(error)
            if isinstance(error, ContractError)
            else f"tuning table {path}: {type(error).__name__}: {error}"
        )
        return None
    if tuning.chip != chip:
        _warn(
            f"tuning table {path} was measured on {tuning.chip!r} and this is {chip!r}: run attnlib tune here"
        )
        return None
    return tuning


def _warn(why: str) -> None:
    warnings.warn(
        f"{why}. It is ignored; ATTNLIB_TUNING=off ignores all tuning tables without a warning.",
        stacklevel=5,
    )
