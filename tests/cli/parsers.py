"""The argparse parsers of all commands."""

from __future__ import annotations

import argparse

from attnlib.bench import arguments as bench
from attnlib.cli import audit_kv, doctor, explain
from attnlib.cli import compile as compile_command
from attnlib.cli import list as list_command
from attnlib.cli import run as run_command
from attnlib.cli.demo.main import parser as demo_parser
from attnlib.cli.main import COMMANDS
from attnlib.cli.tune.main import parser as tune_parser
from attnlib.testing.arguments import parity_parser, replay_parser, verify_parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Command -> its parser."""
    found = {
        "list": list_command.parser(),
        "explain": explain.parser(),
        "compile": compile_command.parser(),
        "doctor": doctor.parser(),
        "demo": demo_parser(),
        "run": run_command.parser(),
        "verify": verify_parser(),
        "parity": parity_parser(),
        "replay": replay_parser(),
        "audit-kv": audit_kv.parser(),
        "bench": bench.parser(),
        "tune": tune_parser(),
    }
    assert found.keys() == COMMANDS.keys()
    return found
