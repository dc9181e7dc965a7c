"""Arguments of the commands: a parser that reports in one line, and types that name the limit.

A type raises `ArgumentTypeError`, so that a wrong value is refused before anything is measured or
written.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import AttnlibError

__all__ = [
    "REQUEST_HELP",
    "add_device_flag",
    "CommandParser",
    "any_device",
    "count",
    "input_file",
    "input_path",
    "known_device",
    "model_dtype",
    "output_file",
    "output_folder",
    "present_device",
    "seconds",
    "seed",
    "workers",
    "write_text",
]

REQUEST_HELP = (
    "as in ATTNLIB_BACKEND: NAME, module:Class, path/to/file.py:Class, prefill:NAME,decode:NAME or "
    "prefix:NAME,suffix:NAME"
)
_MAX_COUNT = 2**31 - 1
_MAX_PROCESSES = 256


class CommandParser(argparse.ArgumentParser):
    """A parser that answers wrong arguments in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line} ({self.prog} --help lists the options)\n")


def _integer(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if not least <= number <= most:
        side = f"below {least}" if number < least else f"above {most}"
        raise argparse.ArgumentTypeError(f"{text} is {side}")
    return number


def count(text: str) -> int:
    """A number of things, at least 1."""
    return _integer(text, 1, _MAX_COUNT)


def workers(text: str) -> int:
    """A number of processes."""
    return _integer(text, 1, _MAX_PROCESSES)


def seed(text: str) -> int:
    """A seed of random numbers, at least 0."""
    return _integer(text, 0, _MAX_COUNT)


def seconds(text: str) -> float:
    """A finite time of at least 0 seconds."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite time of at least 0 seconds")
    return number


def model_dtype(text: str) -> torch.dtype:
    """The dtype of a model or of the queries of a layer."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise argparse.ArgumentTypeError(
            f"{text} is not a torch dtype of a model; use bfloat16, float16 or float32"
        )
    return dtype


def _resolved(text: str) -> DeviceInfo:
    try:
        return resolve_device(text)
    except AttnlibError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def any_device(text: str) -> str:
    """A device of this machine or of another one."""
    _resolved(text)
    return text


def known_device(text: str) -> str:
    """A device that this machine may have; the command reports one that is missing."""
    if _resolved(text).is_hypothetical:
        raise argparse.ArgumentTypeError(
            f"{text} is a GPU of another machine: use cpu, cuda or cuda:1, or run on that machine"
        )
    return text


def present_device(text: str) -> str:
    """A device that this machine has."""
    info = _resolved(text)
    if info.is_hypothetical or info.is_missing:
        raise argparse.ArgumentTypeError(
            f"{text} is not available to torch {torch.__version__}: use cpu, or run on a machine "
            "that has it"
        )
    return text


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, a device of this machine."""
    parser.add_argument(
        "--device",
        type=present_device,
        help="cpu, cuda, cuda:1 (default: a GPU if torch has one, else the CPU)",
    )


def _path(check: Callable[[Path], str]) -> Callable[[str], str]:
    """A type that refuses paths for which `check` returns a reason."""

    def parse(text: str) -> str:
        try:
            reason = check(Path(text)) if text.strip() else "is empty"
        except (OSError, ValueError) as error:  # too long, or with null bytes
            reason = f"cannot be used: {error}"
        if reason:
            raise argparse.ArgumentTypeError(f"{text!r} {reason}")
        return text

    return parse


def _input_reason(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    return "" if os.access(path, os.R_OK) else "cannot be read"


def _input_file_reason(path: Path) -> str:
    return "is a folder, not a file" if path.is_dir() else _input_reason(path)


def _output_reason(path: Path, is_folder: bool) -> str:
    if path.is_dir() and not is_folder:
        return "is a folder, not a file"
    if path.exists() and not path.is_dir() and is_folder:
        return "is a file, not a folder"
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    if existing != path and not existing.is_dir():
        return f"cannot be written: {existing} is not a folder"
    return "" if os.access(existing, os.W_OK) else f"cannot be written: no access to {existing}"


input_path = _path(_input_reason)
"""A file or folder that exists."""
input_file = _path(_input_file_reason)
"""A file that exists."""
output_file = _path(lambda path: _output_reason(path, is_folder=False))
"""A file that can be written; its folders are made when it is."""
output_folder = _path(lambda path: _output_reason(path, is_folder=True))
"""A folder that can be written or made."""


def write_text(path: str, text: str) -> None:
    """Write a text and a final newline to a file, and make its folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n", encoding="utf-8")
