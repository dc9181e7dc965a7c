"""What the files of recorded calls have in common."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.ops.addresses import shortened

__all__ = ["KEY_OF_STATES", "as_folder", "as_path", "read_file", "refuse_damaged", "write_file"]

KEY_OF_STATES = "attnlib_state_recording"
"""Of the version in files of calls of state layers."""


def as_path(folder: str | Path) -> Path:
    """A folder, which is not created.

    Raises:
        ContractError: no path.
    """
    try:
        return Path(folder)
    except TypeError as error:
        raise ContractError(f"{shortened(folder)} is not a path: {error}") from None


def as_folder(folder: str | Path) -> Path:
    """A folder, which is created if necessary.

    Raises:
        ContractError: it cannot be created.
    """
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError) as error:
        raise ContractError(
            f"folder {folder!r} cannot be created ({error}): pass a folder that can be written"
        ) from None
    return path


def write_file(data: dict[str, Any], path: str | Path) -> Path:
    """Write tensors and plain values, and create the folder if necessary. Returns the path.

    Raises:
        ContractError: the file cannot be written, as on a full disk; an earlier one of this path
            stays as it is.
    """
    target = Path(path)
    partial = target.parent / f"{target.name}.{os.getpid()}.part"
    try:
        if target.exists() and not target.is_file():
            raise OSError("it is not a file")
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(data, file)
        partial.replace(target)
    except (OSError, RuntimeError) as error:
        if partial.is_file():
            partial.unlink()
        reason = str(error).strip().partition("\n")[0]
        raise ContractError(
            f"recording {target} cannot be written ({reason}): pass a folder that can be written, "
            "on a disk with enough space, or record fewer calls (every=...)"
        ) from None
    return target


def read_file(path: Path) -> Any:
    """The content of a file of `torch.save`.

    Raises:
        ContractError: it is not such a file.
    """
    if not path.is_file():
        raise ContractError(f"{path} is not a file: give a file of save_recording or record_calls")
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:  # its advice, weights_only=False, would run the file
        raise ContractError(
            f"{path} cannot be read as a recording: it is damaged, or no file of save_recording or "
            "record_calls"
        ) from error
    except Exception as error:  # the reader of a damaged file raises errors of many kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ContractError(f"{path} cannot be read as a recording: {reason}") from error


@contextmanager
def refuse_damaged(path: str | Path) -> Iterator[None]:
    """Context in which errors of a file's content name the file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        own = "" if isinstance(error, ContractError) else f"{type(error).__name__}: "
        reason = f"{own}{error}".partition("\n")[0]
        raise ContractError(
            f"{path} is a damaged recording ({reason}): record the call again"
        ) from error
