"""Command-line flags for a spec: the config of a model, and fields that override it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from attnlib.cli.hf_config import specs_from_config
from attnlib.errors import ContractError
from attnlib.kv_dtype import KV_CACHE_DTYPES
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, AttentionType, MaskKind

__all__ = ["add_spec_flags", "names_a_spec", "spec_fields", "specs_of"]

_NUMBERS = (
    "num_heads",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "block_size",
    "sliding_window",
    "attention_chunk_size",
)
_SWITCHES = (
    "has_alibi", "has_sink", "allow_fp8_queries", "use_mla", "needs_lse", "kv_sharing",
    "batch_invariant",
)  # fmt: skip
_WORDS = (
    "kv_cache_dtype",
    "kv_scale_kind",
    "kv_cache_layout",
    "logits_soft_cap",
    "attn_type",
    "mask_kind",
)


def add_spec_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and one flag for each field of a spec."""
    parser.add_argument(
        "--config", help="a Hugging Face config.json or its directory; the flags below override it"
    )
    spec = parser.add_argument_group(
        "the spec (default: 32 query heads, 8 KV heads, head size 128, bfloat16)"
    )
    for name in _NUMBERS:
        spec.add_argument(f"--{name.replace('_', '-')}", type=int)
    spec.add_argument("--dtype", help="bfloat16, float16, float32")
    spec.add_argument("--kv-cache-dtype", help=", ".join(KV_CACHE_DTYPES))
    spec.add_argument("--kv-scale-kind", choices=("tensor", "head"))
    spec.add_argument("--kv-cache-layout")
    spec.add_argument("--logits-soft-cap", type=float)
    spec.add_argument("--skip-softmax-threshold", type=float)
    spec.add_argument(
        "--compressed-entries",
        help="a second key stream: RATE:BLOCK_SIZE for all entries or RATE:BLOCK_SIZE:MAX_SELECTED "
        "for selected ones, for example 4:64:512",
    )
    spec.add_argument(
        "--key-selection",
        help="lists of selected keys: SCOPE:BLOCK_SIZE:MAX_BLOCKS, for example kv_head:128:16",
    )
    spec.add_argument("--attn-type", choices=[kind.value for kind in AttentionType])
    spec.add_argument("--mask-kind", choices=[kind.value for kind in MaskKind])
    for name in _SWITCHES:
        spec.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=None)


def names_a_spec(options: argparse.Namespace) -> bool:
    """True if any of the flags was given."""
    return bool(options.config or spec_fields(options))


def specs_of(options: argparse.Namespace) -> dict[str, AttentionSpec]:
    """Kind of layer -> spec: from the config, or from the flags alone under the name "".

    Raises:
        ContractError: an unknown dtype, or a field that no layer can have.
    """
    fields = spec_fields(options)
    if options.config:
        return specs_from_config(options.config, **fields)
    return {
        "": AttentionSpec(
            **{
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_size": 128,
                "dtype": torch.bfloat16,
                **fields,
            }
        )
    }


def spec_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Field -> value of the flags that were given.

    Raises:
        ContractError: --dtype is not a torch dtype, or --key-selection or
            --compressed-entries does not parse.
    """
    names = (*_NUMBERS, *_SWITCHES, *_WORDS)
    fields = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.dtype:
        dtype = getattr(torch, options.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ContractError(
                f"--dtype {options.dtype} is not a torch dtype; use bfloat16, float16 or float32"
            )
        fields["dtype"] = dtype
    if options.key_selection:
        fields["key_selection"] = KeySelection.parse(options.key_selection)
    if options.compressed_entries:
        fields["compressed_entries"] = CompressedEntries.parse(options.compressed_entries)
    return fields
