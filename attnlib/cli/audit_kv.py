"""`attnlib audit-kv`: the error, saturation and memory of each KV format on a model's own calls."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnlib import example_model
from attnlib.cli.arguments import (
    CommandParser,
    count,
    input_file,
    model_dtype,
    output_file,
    present_device,
    write_text,
)
from attnlib.errors import ContractError

if TYPE_CHECKING:
    from attnlib.debug.kv_audit import AuditFormat, FormatErrors, KVAudit

__all__ = ["main", "parser"]

_BLOCK_SIZE = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Audit a model or recordings; returns 0, or 2 if it cannot run."""
    from attnlib.debug.kv_audit import KVAudit

    options = parser().parse_args(argv)
    formats = _formats(options.formats)
    if options.figure and importlib.util.find_spec("matplotlib") is None:
        print('attnlib audit-kv --figure: pip install "attnlib[bench]"', file=sys.stderr)
        return 2
    audit = KVAudit()
    if options.recordings:
        source = f"{len(options.recordings)} recorded calls"
        _audit_recordings(options.recordings, formats, options.device or "cpu", audit)
    elif importlib.util.find_spec("transformers") is None:
        print(
            'attnlib audit-kv runs a transformers model: pip install "attnlib[transformers]", or '
            "pass recordings with --recordings",
            file=sys.stderr,
        )
        return 2
    else:
        source = _audit_model(options, formats, audit)
    print(_table(audit, formats, source, options.layers))
    if options.json:
        document = {"source": source, "layers": audit.to_dict()}
        write_text(options.json, json.dumps(document, indent=1))
    if options.figure:
        from attnlib.bench.kv_audit_figure import draw_audit

        Path(options.figure).parent.mkdir(parents=True, exist_ok=True)
        draw_audit(audit, [one.label for one in formats], source, options.figure)
    return 0


def _formats(names: str | None) -> list[AuditFormat]:
    from attnlib.debug.kv_audit import AUDIT_FORMATS

    known = {one.label: one for one in AUDIT_FORMATS}
    if names is None:
        return list(AUDIT_FORMATS)
    wanted = [name.strip() for name in names.split(";")]
    if unknown := [name for name in wanted if name not in known]:
        raise ContractError(
            f"--formats {unknown[0]!r} is not known; use some of {'; '.join(known)}"
        )
    return [known[name] for name in wanted]


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
) -> str:
    """Prefill a text and audit the call of every layer; returns a description of the model."""
    from attnlib.cli.demo.model import load_model
    from attnlib.debug.kv_audit import audit_call
    from attnlib.debug.record import capture_layer_call
    from attnlib.instrumentation import OBSERVERS
    from attnlib.integrations.transformers.paged_model import PagedModel
    from attnlib.metadata.common import CommonAttentionMetadata
    from attnlib.selection.current import current_request

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = options.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    current_request(options.backend)  # a wrong name is refused before the model is loaded
    prompt = _prompt(options.prompts) if options.prompts else example_model.text()
    loaded = load_model(options.model, device, dtype)
    tokens = loaded.encode(prompt)[: options.max_tokens]
    num_blocks = -(-len(tokens) // _BLOCK_SIZE)
    common = CommonAttentionMetadata.from_lengths(
        [len(tokens)], [len(tokens)], [list(range(num_blocks))], _BLOCK_SIZE, device
    )
    paged = PagedModel(
        loaded.model, num_blocks=num_blocks, block_size=_BLOCK_SIZE, backend=options.backend,
        latents=False,
    )  # fmt: skip
    names: dict[int, str] = {}

    def observe(layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any,
                *rest: Any) -> None:  # fmt: skip
        step = capture_layer_call(layer, query, key, value, cache, metadata, needs_lse=False)
        name = names.setdefault(id(layer), f"layer {len(names)}")
        audit.add(name, audit_call(step, formats), step.spec)

    OBSERVERS.append(observe)
    try:
        with paged.attached():
            paged.step(
                torch.tensor(tokens, device=device),
                torch.arange(len(tokens), device=device),
                common,
                rows=torch.tensor([len(tokens) - 1]),
            )
    finally:
        OBSERVERS.remove(observe)
    return f"{loaded.name}, {len(tokens)} tokens"


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


_MEMORY = f"{'bytes/token':>11} {'saved':>6}"
_HEADER = f"{'LSE':>9} {'max':>9} {'saturated':>10}"


def _columns(errors: FormatErrors) -> str:
    """The columns of `_HEADER`."""
    return f"{errors.mean_lse_error:>9.2e} {errors.max_lse_error:>9.2e} {errors.saturation:>10.2%}"


def _table(audit: KVAudit, formats: Sequence[AuditFormat], source: str, all_layers: bool) -> str:
    lines = [
        f"KV formats on {source}",
        "output error: root mean square, relative to the output; LSE error: mean and largest",
        "",
        f"{'format':24} {_MEMORY} {'output':>9} {'worst layer':>20} {_HEADER}",
    ]
    auto = sum(audit.bytes_per_token.values())
    for one in formats:
        total = audit.total(one.label)
        if total.reason:
            lines.append(f"{one.label:24} {total.reason}")
            continue
        worst = max(audit.layers, key=lambda name: audit.layers[name][one.label].output_error)
        error = audit.layers[worst][one.label].output_error
        lines.append(
            f"{one.label:24} {total.bytes_per_token:>11} {1 - total.bytes_per_token / auto:>6.0%} "
            f"{total.output_error:>9.2e} {f'{worst} {error:.2e}':>20} {_columns(total)}"
        )
    if all_layers:
        width = max(map(len, ("layer", *audit.layers)))
        lines += ["", f"{'layer':{width}} {'format':24} {_MEMORY} {'output':>9} {_HEADER}"]
        for name, found in audit.layers.items():
            for label, errors in found.items():
                if errors.reason:
                    lines.append(f"{name:{width}} {label:24} {errors.reason}")
                    continue
                saved = 1 - errors.bytes_per_token / audit.bytes_per_token[name]
                lines.append(
                    f"{name:{width}} {label:24} {errors.bytes_per_token:>11} {saved:>6.0%} "
                    f"{errors.output_error:>9.2e} {_columns(errors)}"
                )
    return "\n".join(lines)


def parser() -> CommandParser:
    """The arguments of `attnlib audit-kv`."""
    made = CommandParser(
        prog="attnlib audit-kv",
        description="Store the keys and values of a model's own attention calls in each KV format "
        "and report the error of outputs and log-sum-exps, saturation and memory.",
    )
    source = made.add_mutually_exclusive_group()
    source.add_argument(
        "--model", help="a folder or a name for transformers; default: Gemma 3 270M if "
        "attnlib[model] is installed, else `seeded`, a small decoder whose random weights say "
        "nothing about other models",
    )  # fmt: skip
    source.add_argument(
        "--recordings",
        nargs="+",
        type=input_file,
        metavar="FILE",
        help="calls saved by attnlib.debug.record",
    )
    made.add_argument(
        "--prompts",
        type=input_file,
        metavar="FILE",
        help="a text; default: chapters of the language reference of Python",
    )
    made.add_argument(
        "--max-tokens", type=count, default=1024, metavar="N", help="of the text (default 1024)"
    )
    made.add_argument("--formats", help="labels of the table, separated by ';' (default: all)")
    made.add_argument("--layers", action="store_true", help="print every layer")
    made.add_argument(
        "--device", type=present_device, help="cpu or cuda (default: a GPU if there is one)"
    )
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
