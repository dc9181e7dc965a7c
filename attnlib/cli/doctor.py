"""`attnlib doctor`: what is installed, what works, and how to fix the rest.

The command always finishes: every section catches its exceptions and reports them, and each backend
is checked in a subprocess.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attnlib.cli.arguments import CommandParser
from attnlib.cli.kernels import kernel_facts
from attnlib.cli.spec_flags import add_spec_flags, names_a_spec, specs_of
from attnlib.env import ENVIRONMENT, FOREIGN_VARIABLES, unknown_variables
from attnlib.integrations.features import ENGINES, features_of
from attnlib.kv_formats import load_kv_formats

__all__ = ["main", "parser"]

_PACKAGES = (
    "attnlib",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; returns 0 if at least one backend works here, else 1."""
    options = parser().parse_args(argv)
    findings = {
        "versions": _guarded(_versions),
        "machine": _guarded(_machine),
        "environment": _guarded(_environment),
        "kernels": _guarded(kernel_facts),
        "engines": _guarded(_engines),
        "kv formats": _guarded(_kv_formats),
        "caches": _guarded(lambda: _caches(options)),
    }
    if not options.json:
        _show(findings)
        print("backends", flush=True)  # the checks take longest
    backends = findings["backends"] = _guarded(_backends)
    if options.json:
        print(json.dumps(findings, indent=2, default=str))
    else:
        _show_backends(backends)
    return 0 if isinstance(backends, list) and any(row["works"] for row in backends) else 1


def parser() -> CommandParser:
    """The arguments of `attnlib doctor`."""
    made = CommandParser(
        prog="attnlib doctor",
        description="Check versions and hardware, and run a small batch on every backend; and what "
        "the caches of a layer or a model store, if one is given.",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    add_spec_flags(made)
    return made


def _guarded(section: Callable[[], Any]) -> Any:
    try:
        return section()
    except Exception as error:  # the other sections must still be printed
        return {"failed": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str]:
    found = {"python": f"{platform.python_version()}, {sys.executable}"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "torch CUDA": torch.version.cuda or "none",
        "torch HIP": torch.version.hip or "none",
        "torch C++11 ABI": torch.compiled_with_cxx11_abi(),
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            facts[f"cuda:{index}"] = (
                f"{properties.name}, sm_{properties.major}{properties.minor}, "
                f"{properties.multi_processor_count} SMs, {properties.total_memory // 2**30} GiB"
            )
    else:
        facts["GPU"] = "torch finds none"
    return facts


def _environment() -> dict[str, str]:
    ours = {
        name: os.environ.get(name, f"(default {variable.default or 'none'})")
        for name, variable in ENVIRONMENT.items()
    }
    foreign = {
        name: f"{os.environ[name]}  (not read by attnlib)"
        for name in FOREIGN_VARIABLES
        if name in os.environ
    }
    unknown = {
        name: f"{os.environ[name]}  (unknown{f'; did you mean {nearest}?' if nearest else ''})"
        for name, nearest in unknown_variables().items()
    }
    return {
        **ours,
        **foreign,
        **unknown,
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "(not set)"),
    }


def _engines() -> dict[str, Any]:
    """Installed engine -> its features, or why there are none."""
    found: dict[str, Any] = {}
    for engine, releases in ENGINES.items():
        try:
            installed = version(engine)
        except PackageNotFoundError:
            continue
        known = features_of(engine, installed)
        found[f"{engine} {installed}"] = known or f"no tested release: {', '.join(releases)}"
    return found


def _kv_formats() -> dict[str, str]:
    """Open formats, and why those of installed packages cannot be used."""
    formats, failed = load_kv_formats()
    found = {
        one.name: f"version {one.version}, read by {'torch, triton' if one.number else 'torch'}"
        for one in formats
    }
    return found | {f"failed {number}": text for number, text in enumerate(failed, 1)}


def _caches(options: argparse.Namespace) -> dict[str, str]:
    """Formats, rotation and warnings of the caches of the layers that the options name."""
    from attnlib.selection.cache_lines import cache_lines

    specs = specs_of(options) if names_a_spec(options) else {}
    lines = {name: cache_lines(spec) or [spec.kv_format.name] for name, spec in specs.items()}
    return {name or "layer": "; ".join(found) for name, found in lines.items()}


def _backends() -> list[dict[str, Any]]:
    from attnlib.cli.subprocess_check import check_in_subprocesses
    from attnlib.selection.registry import list_backends, registrations

    return check_in_subprocesses([registrations()[name] for name in list_backends()])


def _show_engines(engines: dict[str, Any]) -> None:
    """How many features were tested, and each other one with its reason."""
    if engines:
        print("engines")
    for engine, features in engines.items():
        if isinstance(features, str):
            print(f"  {engine:<24} {features}")
            continue
        others = {name: cell for name, cell in features.items() if ": " in cell}
        print(f"  {engine:<24} {len(features) - len(others)} features tested, except")
        for name, cell in others.items():
            print(f"    {name:<38} {cell}")


def _show(findings: dict[str, Any]) -> None:
    for title in ("versions", "machine", "environment", "kernels"):
        print(title)
        for name, value in findings[title].items():
            print(f"  {name:<24} {value}")
    _show_engines(findings["engines"])
    for title in ("kv formats", "caches"):
        if findings[title]:
            print(title)
        for name, value in findings[title].items():
            print(f"  {name:<24} {value}")


def _show_backends(backends: Any) -> None:
    for row in (
        backends
        if isinstance(backends, list)
        else [{"name": "?", "works": False, "finding": backends["failed"], "remarks": []}]
    ):
        print(f"  {row['name']:<14} {'works' if row['works'] else '-':<6} {row['finding']}")
        for remark in row["remarks"]:
            print(f"  {'':<21} {remark}")
