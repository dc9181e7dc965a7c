"""`attnlib explain`: which backend is selected for a layer or a model, and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence

from attnlib.cli.arguments import REQUEST_HELP, CommandParser, any_device, count, input_path
from attnlib.cli.hf_config import fallback_lines
from attnlib.cli.hf_file import read_config
from attnlib.cli.kernels import KernelsOfSpec, kernels_of
from attnlib.cli.layer_kinds import has_states
from attnlib.cli.server_flags import add_server_flags, rank_specs, server_of
from attnlib.cli.spec_flags import DEFAULT_LAYER, add_spec_flags, names_a_spec, specs_of
from attnlib.device import resolve_device
from attnlib.parallel import Interleaved, explain_parallel
from attnlib.selection import explain
from attnlib.spec import AttentionSpec

__all__ = ["main", "parser"]

_STATES = (
    "\nthe state layers of this model are not among them: for their StateSpec, "
    "attnlib.explain(spec) names the backend"
)
_CACHE = "cache"
"""The value of `--kernels` without a folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table per kind of layer; returns 1 if a kind has no backend, else 0."""
    options = parser().parse_args(argv)
    device = resolve_device(options.device)
    specs = rank_specs(specs_of(options), options.tensor_parallel)
    reports = {kind: explain(spec, device, options.backend) for kind, spec in specs.items()}
    fallbacks = {
        kind: fallback_lines(spec) if options.config else [] for kind, spec in specs.items()
    }
    divided = _divided(specs, options)
    kernels: dict[str, KernelsOfSpec] = {}
    if options.kernels is not None:
        on_triton = {
            kind: specs[kind] for kind, found in reports.items() if found.chosen == "triton"
        }
        kernels = kernels_of(server_of(options), on_triton, options.kernels)
    if options.json:
        described = {
            kind or "spec": report.to_dict()
            | ({"fallbacks": fallbacks[kind]} if fallbacks[kind] else {})
            | ({"kernels": kernels[kind].to_dict()} if kind in kernels else {})
            | ({"divided_keys": divided[kind]} if divided else {})
            for kind, report in reports.items()
        }
        print(json.dumps(described, indent=2))
    else:
        lines = {kind: [*fallbacks[kind]] for kind in specs}
        for kind, found in kernels.items():
            lines[kind].append(str(found))
        if not names_a_spec(options):
            print(f"a layer of {DEFAULT_LAYER} (--help lists the flags of others)\n")
        print(
            "\n\n".join(
                (f"{kind}\n" if kind else "")
                + "\n".join([str(report), *_notes(lines[kind]), *divided.get(kind, [])])
                for kind, report in reports.items()
            )
        )
        if options.config and has_states(read_config(options.config)[1]):
            print(_STATES)
    return 0 if all(report.chosen for report in reports.values()) else 1


def _divided(
    specs: Mapping[str, AttentionSpec], options: argparse.Namespace
) -> dict[str, list[str]]:
    """Kind of layer -> lines about what a rank computes over its keys; empty for one rank."""
    ranks = options.divide_keys
    if ranks == 1:
        return {}
    arguments = {"backend": options.backend, "device": options.device}
    return {
        kind: explain_parallel(spec, Interleaved(ranks), **arguments).splitlines()
        for kind, spec in specs.items()
    }


def _notes(lines: Sequence[str]) -> list[str]:
    """Lines below a table, wrapped like its reasons."""
    return [
        textwrap.fill(f"note: {line}", 96, initial_indent="  ", subsequent_indent="        ")
        for line in lines
    ]


def _kernel_place(text: str) -> str:
    """A folder of kernels, or the word for Triton's cache."""
    return "" if text == _CACHE else input_path(text)


def parser() -> CommandParser:
    """The arguments of `attnlib explain`."""
    made = CommandParser(
        prog="attnlib explain",
        description="Show which backend is selected for a layer or a model, and why.",
    )
    made.add_argument(
        "--device",
        type=any_device,
        help="cpu, cuda, cuda:1, or a GPU of another machine: sm_75, sm_80, sm_90, sm_100, ... or "
        'its name, such as H200 or "NVIDIA H100 NVL", for which measured rankings apply',
    )
    made.add_argument(
        "--backend",
        metavar="REQUEST",
        help=f"{REQUEST_HELP}; or -NAME, which excludes a backend",
    )
    made.add_argument(
        "--kernels",
        type=_kernel_place,
        nargs="?",
        const=_CACHE,
        metavar="FOLDER",
        help="also show how many kernels of the triton backend are compiled: in a folder of "
        "attnlib compile, or in Triton's cache (without FOLDER)",
    )
    made.add_argument(
        "--divide-keys",
        type=count,
        default=1,
        metavar="N",
        help="also show what each of N ranks computes that divide the keys of a layer (X-rules)",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    add_server_flags(made)
    add_spec_flags(made)
    return made
