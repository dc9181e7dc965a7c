"""The command line: `attnlib list`, `explain`, `doctor`, `demo`, `verify`, `parity`.

Each command is a file of its own with `main(argv) -> exit status`, imported when it is called.
"""

from attnlib.cli.main import main

__all__ = ["main"]
