"""The file of a chip's tuning table, read once on first use and never at import.

A table that cannot be used is ignored after one warning: a damaged table, or one measured on
another chip, must not stop a program.
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

__all__ = ["chip_name", "clear_cache", "generation", "table_path", "tuning_for", "warn_ignored"]

_MAX_READ = 64
_read: dict[tuple[str, str], Tuning | None] = {}
"""(ATTNLIB_TUNING, chip) -> table; cleared when it is full."""
_generation = 0


def chip_name(device: DeviceInfo) -> str | None:
    """The name of the chip in tables: the driver's name of a GPU, or "cpu".

    Returns None if there is nothing to measure on.
    """
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
    """The file of a chip's table, which may not exist: ATTNLIB_TUNING, by default a file in the
    user's cache folder.

    Returns:
        None if ATTNLIB_TUNING=off.
    """
    setting = env.read("ATTNLIB_TUNING")
    if setting.lower() == "off":
        return None
    if setting:
        return Path(setting).expanduser()
    slug = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    return Path("~/.cache/attnlib/tuning").expanduser() / f"{slug}.json"


def tuning_for(device: DeviceInfo) -> Tuning | None:
    """The table for a device.

    Returns None if there is none, if it is switched off, or, after a warning, if it is unusable.
    """
    chip = chip_name(device)
    if chip is None:
        return None
    key = (env.read("ATTNLIB_TUNING"), chip)
    if key not in _read:
        if len(_read) >= _MAX_READ:
            _read.clear()
        _read[key] = _load(chip)
    return _read[key]


def clear_cache() -> None:
    """Read tables again on next use. Call it after writing one."""
    global _generation
    _read.clear()
    _generation += 1


def generation() -> int:
    """A number that changes whenever `clear_cache` is called.

    It is part of the key of cached selections.
    """
    return _generation


def warn_ignored(why: str) -> None:
    """Warn that a table, or a part of it, is ignored."""
    warnings.warn(
        f"{why}. It is ignored; ATTNLIB_TUNING=off ignores all tuning tables without a warning.",
        stacklevel=5,
    )


def _load(chip: str) -> Tuning | None:
    path: Path | None = None
    try:
        path = table_path(chip)
        if path is None or (not path.exists() and not env.read("ATTNLIB_TUNING")):
            return None
        tuning = parse_tuning(json.loads(path.read_text(encoding="utf-8")), str(path))
    except ContractError as error:
        warn_ignored(str(error))
        return None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there is no home folder
        warn_ignored(f"tuning table {path}: {type(error).__name__}: {error}")
        return None
    if tuning.chip != chip:
        warn_ignored(
            f"tuning table {path} was measured on {tuning.chip!r} and this is {chip!r}: "
            "run attnlib tune here"
        )
        return None
    return tuning
