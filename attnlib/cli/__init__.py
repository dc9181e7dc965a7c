"""The command line interface.

Each command is a module or package with `main(argv) -> exit status`, imported when it is called.
"""

from attnlib.cli.main import main

__all__ = ["main"]
