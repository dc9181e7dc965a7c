"""`attnlib list`: all backends, and whether they can run here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from attnlib.device import resolve_device
from attnlib.selection.registry import availability, list_backends, registrations

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status, always 0."""
    parser = argparse.ArgumentParser(
        prog="attnlib list", description="List all backends and whether they can run here."
    )
    parser.add_argument(
        "--device",
        default=None,
        help="device to check (default: a GPU if there is one, else the CPU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    rows = []
    for entry in (registrations()[name] for name in list_backends()):
        backend, reasons = availability(entry, device)
        rows.append(
            {
                "name": entry.name,
                "priority": entry.priority,
                "origin": entry.origin,
                "description": backend.description if backend else "",
                "available": backend is not None and not reasons,
                "reasons": reasons,
            }
        )
    if options.json:
        print(json.dumps({"device": str(device), "backends": rows}, indent=2))
        return 0
    print(f"backends on {device}")
    for row in rows:
        text = row["description"] if row["available"] else "; ".join(row["reasons"])  # type: ignore[arg-type]  # a list of str in every row
        print(
            f"  {row['name']:<12} {'available' if row['available'] else 'unavailable':<11}  {text}"
        )
    return 0
