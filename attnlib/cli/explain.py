"""`attnlib explain`: which backend a spec or a model gets, and why the others do not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from attnlib.cli.hf_config import specs_from_config
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.selection import explain
from attnlib.spec import AttentionSpec, AttentionType, MaskKind

__all__ = ["main"]

_NUMBERS = ("num_heads", "num_kv_heads", "head_size", "head_size_v", "block_size", "sliding_window", "attention_chunk_size")
_SWITCHES = ("has_alibi", "has_sink", "use_mla", "needs_lse", "kv_sharing", "batch_invariant")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table for each kind of layer; 1 when some kind gets no backend."""
    options = _parser().parse_args(argv)
    device = resolve_device(options.device)
    fields = _fields(options)
    if options.config:
        specs = specs_from_config(options.config, **fields)
    else:
        specs = {"": AttentionSpec(**{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16, **fields})}
    reports = {kind: explain(spec, device, options.backend) for kind, spec in specs.items()}
    if options.json:
        print(json.dumps({kind or "spec": report.to_dict() for kind, report in reports.items()}, indent=2))
    else:
        print("\n\n".join((f"{kind}\n" if kind else "") + str(report) for kind, report in reports.items()))
    return 0 if all(report.chosen for report in reports.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlib explain", description="Which backend a spec or a model gets, and why the others do not.")
    parser.add_argument("--config", help="a Hugging Face config.json, or its folder; flags below win over it")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, or hardware that is not here: sm_75, sm_80, sm_90, sm_100 ...")
    parser.add_argument("--backend", help="as ATTNLIB_BACKEND: a name, prefill:NAME,decode:NAME, or -NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    spec = parser.add_argument_group("the spec (default: 32 query heads, 8 KV heads, head size 128, bfloat16)")
    for name in _NUMBERS:
        spec.add_argument(f"--{name.replace('_', '-')}", type=int)
    spec.add_argument("--dtype", help="bfloat16, float16, float32")
    spec.add_argument("--kv-cache-dtype", help="auto, fp8, fp8_e4m3, fp8_e5m2, ...")
    spec.add_argument("--kv-scale-kind", choices=("tensor", "head"))
    spec.add_argument("--kv-cache-layout")
    spec.add_argument("--logits-soft-cap", type=float)
    spec.add_argument("--attn-type", choices=[kind.value for kind in AttentionType])
    spec.add_argument("--mask-kind", choices=[kind.value for kind in MaskKind])
    for name in _SWITCHES:
        spec.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=None)
    return parser


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    names = (*_NUMBERS, *_SWITCHES, "kv_cache_dtype", "kv_scale_kind", "kv_cache_layout", "logits_soft_cap", "attn_type", "mask_kind")
    fields = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.dtype:
        dtype = getattr(torch, options.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ContractError(f"--dtype {options.dtype} is no torch dtype; use bfloat16, float16 or float32")
        fields["dtype"] = dtype
    return fields

