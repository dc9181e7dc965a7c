"""The `attnlib` command: dispatches to the subcommands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from attnlib.env import warn_about_unread_variables
from attnlib.errors import AttnlibError, ContractError

__all__ = ["COMMANDS", "main"]


@dataclass(frozen=True)
class _Command:
    """One subcommand: the path of its `main(argv)`, and one line of help."""

    path: str
    help: str

    def load(self) -> Callable[[Sequence[str]], int]:
        module, name = self.path.split(":")
        found: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
        return found


COMMANDS: dict[str, _Command] = {
    "list": _Command("attnlib.cli.list:main", "list all backends and whether they can run here"),
    "explain": _Command(
        "attnlib.cli.explain:main", "show which backend is selected for a layer or a model, and why"
    ),
    "compile": _Command(
        "attnlib.cli.compile:main",
        "compile a model's kernels for a GPU of another machine",
    ),
    "doctor": _Command(
        "attnlib.cli.doctor:main",
        "check versions and hardware, and run a small batch on every backend",
    ),
    "demo": _Command(
        "attnlib.cli.demo:main",
        "serve a batch of prompts over the paged cache and check every token",
    ),
    "run": _Command("attnlib.cli.run:main", "run a program whose transformers models use attnlib"),
    "verify": _Command(
        "attnlib.testing.commands:verify_main",
        "run the conformance suite on a backend",
    ),
    "parity": _Command(
        "attnlib.testing.commands:parity_main",
        "compare every pair of installed backends",
    ),
    "replay": _Command(
        "attnlib.testing.commands:replay_main",
        "run a recorded call on a backend and reduce it while it fails",
    ),
    "audit-kv": _Command(
        "attnlib.cli.audit_kv:main",
        "compare the errors and the memory of KV formats on a model's own calls",
    ),
    "bench": _Command(
        "attnlib.bench.command:main", "compare backends: check their outputs, then time them"
    ),
    "tune": _Command(
        "attnlib.cli.tune:main",
        "measure backends and their parameters on this chip for automatic selection",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib ARGS`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters that a terminal lacks, names of files
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, and not when the interpreter ends, errors have a message
        return status
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        status = 1
    except (AttnlibError, OSError) as error:
        print(f"{' '.join(['attnlib', *arguments[:1]])}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # the interpreter would try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        from attnlib import __version__

        print(f"attnlib {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0] not in COMMANDS:
        return _usage(arguments)
    warn_about_unread_variables()
    try:
        with _current_folder_on_path():
            return COMMANDS[arguments[0]].load()(arguments[1:])
    except SystemExit as end:  # of the parser: --help, or an error that it has printed
        return end.code if isinstance(end.code, int) else int(end.code is not None)


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Let `module:Class` name a module of the current folder in every command and in
    ATTNLIB_BACKEND, as `python -m attnlib` does."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ContractError(
            "the current folder was removed: change to one that exists, and run the command again"
        ) from None
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _usage(arguments: Sequence[str]) -> int:
    wrong = bool(arguments) and arguments[0] not in ("-h", "--help")
    out = sys.stderr if wrong else sys.stdout
    if wrong:
        nearest = get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        print(f"attnlib: unknown command {arguments[0]!r}{hint}\n", file=out)
    print(
        "usage: attnlib COMMAND [OPTIONS]   (attnlib COMMAND --help lists the options)\n", file=out
    )
    for name, command in COMMANDS.items():
        print(f"  {name:<8} {command.help}", file=out)
    return 2 if wrong else 0
