"""`attnlib audit-kv`: the error, saturation and memory of each KV format on a model's own calls."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnlib import example_model
from attnlib.cli.arguments import (
    CommandParser,
    add_device_flag,
    count,
    input_file,
    model_dtype,
    output_file,
    write_text,
)
from attnlib.cli.audit_tables import DTYPE_OF_THE_MODEL, audit_table, quality_table
from attnlib.errors import AttnlibError, ContractError

if TYPE_CHECKING:
    from attnlib.cli.kv_quality import Quality
    from attnlib.debug.kv_audit import AuditFormat, KVAudit

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Audit a model or recordings; returns 0."""
    from attnlib.debug.kv_audit import KVAudit

    options = parser().parse_args(argv)
    _check_options(options)
    formats = _formats(options.formats)
    audit = KVAudit()
    quality: dict[str, dict[str, Quality]] = {}
    if options.recordings:
        source = f"{len(options.recordings)} recorded calls"
        _audit_recordings(options.recordings, formats, options.device or "cpu", audit)
    else:
        source, quality = _audit_model(options, formats, audit)
    labels = [one.label for one in formats]
    print(audit_table(audit, labels, source, options.layers))
    if quality:
        print("\n" + quality_table(quality, audit))
    if options.json:
        rows = {
            label: {text: vars(one) for text, one in row.items()} for label, row in quality.items()
        }
        document = {"source": source, "total": audit.totals(), "quality": rows}
        write_text(options.json, json.dumps(document | {"layers": audit.to_dict()}, indent=1))
    if options.figure:
        from attnlib.bench.kv_audit_figure import draw_audit

        Path(options.figure).parent.mkdir(parents=True, exist_ok=True)
        draw_audit(audit, labels, source, options.figure)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options without an effect, and what could not be run or written at the end."""
    for name in ("prompts", "perplexity", "dtype", "backend"):
        if options.recordings and getattr(options, name):
            raise ContractError(f"--{name} is for models: leave it or --recordings out")
    if options.figure and Path(options.figure).suffix not in (".svg", ".png"):
        raise ContractError(f"--figure {options.figure} must end in .svg or .png")
    extras = {"transformers": not options.recordings, "matplotlib": options.figure}
    for package, needed in extras.items():
        if needed and importlib.util.find_spec(package) is None:
            raise ContractError(f'{package} is not installed: pip install "attnlib[model,bench]"')


def _formats(names: str | None) -> list[AuditFormat]:
    from attnlib.debug.kv_audit import audit_formats, named_format

    if names is None:
        return list(audit_formats())
    found = []
    for name in (one.strip() for one in names.split(";")):
        if "," in name.partition("+")[2]:
            text = "a rotation follows both formats: write KEYS,VALUES+ROTATION"
            raise ContractError(f"--formats {name!r}: {text}")
        try:
            found.append(named_format(name))
        except AttnlibError as error:
            labels = "; ".join(one.label for one in audit_formats())
            text = f"is neither a label ({labels}) nor KEYS[,VALUES][+ROTATION]"
            shown = f": {error}" if ":" in name else f" {text}"
            raise ContractError(f"--formats {name!r}{shown}") from None
    return found


def _audit_recordings(
    files: Sequence[str], formats: Sequence[AuditFormat], device: str, audit: KVAudit
) -> None:
    from attnlib.debug.kv_audit import audit_call
    from attnlib.debug.record import load_recording

    for path in files:
        step = load_recording(path, device)
        audit.add(Path(path).stem, audit_call(step, formats), step.spec)


def _audit_model(
    options: argparse.Namespace, formats: Sequence[AuditFormat], audit: KVAudit
) -> tuple[str, dict[str, dict[str, Quality]]]:
    """Prefill each text and audit the call of every layer; returns a description of the model, and
    label -> text -> quality with `--perplexity`."""
    from attnlib.cli.demo.model import load_model
    from attnlib.cli.kv_quality import measure_quality, reference_of
    from attnlib.selection.current import current_request

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = options.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    current_request(options.backend)  # a wrong name is refused before the model is loaded
    texts = _texts(options)
    loaded, lengths = load_model(options.model, device, dtype), []
    quality: dict[str, dict[str, Quality]] = {}
    for name, text in texts.items():
        tokens = loaded.encode(text)[: options.max_tokens]
        lengths.append(len(tokens))
        _audit_prompt(loaded.model, tokens, options.backend, formats, audit)
        if options.perplexity:
            reference = reference_of(loaded.model, tokens, options.backend)
            quality.setdefault(DTYPE_OF_THE_MODEL, {})[name] = reference.quality
            for one in formats:
                if one.fp8_queries or one.scales == "head":
                    continue  # steps of a `PagedModel` have neither
                with contextlib.suppress(ContractError):  # the audit has the reason
                    found = measure_quality(loaded.model, one, reference, options.backend)
                    quality.setdefault(one.label, {})[name] = found
    tokens_text = " and ".join(map(str, dict.fromkeys(lengths)))
    prompts = f"{len(lengths)} texts of " if len(lengths) > 1 else ""
    return f"{loaded.name}, {prompts}{tokens_text} tokens", quality


def _audit_prompt(
    model: Any,
    tokens: Sequence[int],
    backend: str | None,
    formats: Sequence[AuditFormat],
    audit: KVAudit,
) -> None:
    """Prefill a prompt and audit the call of every layer."""
    from attnlib.cli.kv_quality import paged_model, prefill
    from attnlib.debug.kv_audit import audit_call
    from attnlib.debug.record import capture_layer_call
    from attnlib.instrumentation import OBSERVERS

    names: dict[int, str] = {}

    def observe(layer: Any, *call: Any) -> None:
        step = capture_layer_call(layer, *call[:5], needs_lse=False)
        name = names.setdefault(id(layer), f"layer {len(names)}")
        audit.add(name, audit_call(step, formats), step.spec)

    OBSERVERS.append(observe)
    try:
        prefill(paged_model(model, tokens, backend), tokens, torch.tensor([len(tokens) - 1]))
    finally:
        OBSERVERS.remove(observe)


def _texts(options: argparse.Namespace) -> dict[str, str]:
    """Name -> text of each prompt."""
    if options.prompts:
        return {Path(file).name: _prompt(file) for file in options.prompts}
    names = ("language reference", "debugger") if options.perplexity else ("language reference",)
    return {name: example_model.text(name) for name in names}


def _prompt(file: str) -> str:
    """The text of a file.

    Raises:
        ContractError: it is empty, or not UTF-8.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"--prompts {file} is not a text in UTF-8: {error}") from None
    if not text.strip():
        raise ContractError(f"--prompts {file} is empty: give a file with the text of a prompt")
    return text


def parser() -> CommandParser:
    """The arguments of `attnlib audit-kv`."""
    made = CommandParser(
        prog="attnlib audit-kv",
        description="Store the keys and values of a model's own attention calls in each KV format "
        "and report the error of outputs and log-sum-exps, saturation and memory.",
    )
    source = made.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        help="a folder or a name for transformers; default: Gemma 3 270M if "
        "attnlib[model] is installed, else `seeded`, a small decoder whose random weights say "
        "nothing about other models",
    )
    source.add_argument(
        "--recordings",
        nargs="+",
        type=input_file,
        metavar="FILE",
        help="calls saved by attnlib.debug.record",
    )
    made.add_argument(
        "--prompts",
        nargs="+",
        type=input_file,
        metavar="FILE",
        help="texts, each a prompt; default: chapters of the documentation of Python",
    )
    made.add_argument(
        "--perplexity",
        action="store_true",
        help="also run the texts over a cache of each format, and report perplexity, divergence "
        "and agreement of the next tokens",
    )
    made.add_argument(
        "--max-tokens", type=count, default=1024, metavar="N", help="of a text (default 1024)"
    )
    made.add_argument(
        "--formats",
        help="rows, separated by ';': labels of the table, or KEYS[,VALUES][+ROTATION], names of "
        "formats or path/to/file.py:FORMAT (default: all labels)",
    )
    made.add_argument("--layers", action="store_true", help="print every layer")
    add_device_flag(made)
    made.add_argument(
        "--dtype", type=model_dtype, help="dtype of the model: bfloat16, float16 or float32"
    )
    made.add_argument(
        "--backend", metavar="REQUEST", help="of the model's own attention, as ATTNLIB_BACKEND"
    )
    made.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers to FILE")
    made.add_argument(
        "--figure", type=output_file, metavar="FILE", help="draw SVG or PNG (needs matplotlib)"
    )
    return made
