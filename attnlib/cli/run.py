"""`attnlib run`: a program whose transformers models use attnlib, without changes to the program.

The command replaces itself by the program, so that exit status, signals, input and output are those
of the program. A folder in front of PYTHONPATH makes each Python process below it run
`run_startup/sitecustomize.py` when it starts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from attnlib.cli.arguments import CommandParser
from attnlib.errors import ContractError

__all__ = ["main", "parser"]

_STARTUP = Path(__file__).with_name("run_startup")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program; returns only for `--help`.

    Raises:
        ContractError: there is no such program.
    """
    words = list(sys.argv[2:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        parser().print_help()
        return 0
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        parser().error("no PROGRAM: for example, attnlib run script.py")
    return _become(_command(words), {**os.environ, "PYTHONPATH": _python_path()})


def _command(words: list[str]) -> list[str]:
    """The program to execute, with its path, and its arguments."""
    first = words[0]
    if first in ("-m", "-c"):
        return [sys.executable, *words]
    if first.startswith("-"):
        raise ContractError(
            f"{first} is not an option of attnlib run: write the program first, or -- before it"
        )
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise ContractError(f"{first} does not exist: give the path of a Python file")
        return [sys.executable, *words]
    folders = (os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent))
    found = shutil.which(first, path=os.pathsep.join(folders))
    if found is None:
        raise ContractError(
            f"program {first} is neither on PATH nor beside {sys.executable}: give -m MODULE for a "
            "module, or the path of a .py file"
        )
    return [found, *words[1:]]


def _python_path() -> str:
    rest = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return os.pathsep.join([str(_STARTUP), *(one for one in rest if one != str(_STARTUP))])


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a process may start without them
            stream.flush()
    os.execve(command[0], command, environment)


def parser() -> CommandParser:
    """The arguments of `attnlib run`, for its help."""
    made = CommandParser(
        prog="attnlib run",
        usage="attnlib run [--] PROGRAM [ARGUMENTS]",
        description="Run a program whose transformers models use attnlib. When the program makes "
        "its first model, attnlib is registered, and becomes the attention of all models for which "
        "the program names none. Python programs that it starts do the same, except those with -I, "
        "-E or -S. Exit status and signals are those of the program.",
        epilog="Examples: `attnlib run -- transformers serve Qwen/Qwen3-0.6B`, `attnlib run "
        "script.py`, `attnlib run -m package.module`.",
    )
    made.add_argument(
        "program",
        metavar="PROGRAM",
        help="a program on PATH, a Python file, or -m and a module; then its arguments",
    )
    return made
