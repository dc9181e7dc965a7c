"""`attnlib explain`: which backend is selected for a layer or a model, and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from attnlib.cli.hf_config import fallback_lines
from attnlib.cli.spec_flags import add_spec_flags, specs_of
from attnlib.device import resolve_device
from attnlib.selection import explain

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table per kind of layer; returns 1 if a kind has no backend, else 0."""
    options = _parser().parse_args(argv)
    device = resolve_device(options.device)
    specs = specs_of(options)
    reports = {kind: explain(spec, device, options.backend) for kind, spec in specs.items()}
    fallbacks = {
        kind: fallback_lines(spec) if options.config else [] for kind, spec in specs.items()
    }
    if options.json:
        described = {
            kind or "spec": report.to_dict()
            | ({"fallbacks": fallbacks[kind]} if fallbacks[kind] else {})
            for kind, report in reports.items()
        }
        print(json.dumps(described, indent=2))
    else:
        print(
            "\n\n".join(
                (f"{kind}\n" if kind else "") + "\n".join([str(report), *_notes(fallbacks[kind])])
                for kind, report in reports.items()
            )
        )
    return 0 if all(report.chosen for report in reports.values()) else 1


def _notes(lines: Sequence[str]) -> list[str]:
    """Lines below a table, wrapped like its reasons."""
    return [
        textwrap.fill(f"note: {line}", 96, initial_indent="  ", subsequent_indent="        ")
        for line in lines
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnlib explain",
        description="Show which backend is selected for a layer or a model, and why.",
    )
    parser.add_argument(
        "--device",
        help="cpu, cuda, cuda:1, or a GPU of another machine: sm_75, sm_80, sm_90, sm_100, ... or "
        'its name, such as H200 or "NVIDIA H100 NVL", for which measured rankings apply',
    )
    parser.add_argument(
        "--backend", help="as in ATTNLIB_BACKEND: NAME, prefill:NAME,decode:NAME, or -NAME"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_spec_flags(parser)
    return parser
