"""`attnlib list`: all backends and whether they can run here, and open KV formats."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from attnlib.cli.arguments import CommandParser, any_device
from attnlib.device import DeviceInfo, resolve_device
from attnlib.kv_formats import load_kv_formats
from attnlib.selection.registry import availability, list_backends, registrations

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status, always 0."""
    options = parser().parse_args(argv)
    device = resolve_device(options.device)
    rows = [_row(name, device) for name in list_backends()]
    known, failed = load_kv_formats()
    formats = {one.name: one.version for one in known}
    if options.json:
        found = {"device": str(device), "backends": rows, "kv_formats": formats}
        found["kv_format_failures"] = failed
        print(json.dumps(found, indent=2))
        return 0
    width = max(len(str(row["name"])) for row in rows)
    print(f"backends on {device}")
    for row in rows:
        status = "available" if row["available"] else "unavailable"
        text = row["description"] if row["available"] else "; ".join(row["reasons"])
        first = f"  {row['name']:<{width}}  {status:<11}  "
        indent = " " * len(first)
        wrapped = textwrap.fill(
            text,
            100,
            initial_indent=first,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        print(wrapped or first.rstrip())  # nothing is filled without a description
    if formats or failed:
        print("KV formats of packages")
    for name, version in formats.items():
        print(f"  {name}, version {version}")
    for text in failed:
        print(f"  unavailable: {text}")
    return 0


def _row(name: str, device: DeviceInfo) -> dict[str, Any]:
    """One backend as plain data."""
    entry = registrations()[name]
    backend, reasons = availability(entry, device)
    return {
        "name": entry.name,
        "priority": entry.auto_priority(backend),
        "origin": entry.origin,
        "description": backend.description if backend else "",
        "available": backend is not None and not reasons,
        "reasons": reasons,
    }


def parser() -> CommandParser:
    """The arguments of `attnlib list`."""
    made = CommandParser(
        prog="attnlib list", description="List all backends and whether they can run here."
    )
    made.add_argument(
        "--device",
        type=any_device,
        help="device to check: cpu, cuda, cuda:1, or a GPU of another machine such as sm_90 "
        "(default: a GPU if there is one, else the CPU)",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made
