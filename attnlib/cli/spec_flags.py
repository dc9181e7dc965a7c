"""Command-line flags for a spec: the config of a model, and fields that override it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from attnlib.cache.layout import LAYOUTS
from attnlib.cache.pages import PAGE_LAYOUTS
from attnlib.cli.arguments import count, input_path, model_dtype
from attnlib.cli.hf_config import specs_from_config
from attnlib.kv_dtype import KV_CACHE_DTYPES
from attnlib.kv_rotation import KV_ROTATIONS
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, AttentionType, MaskKind

__all__ = ["DEFAULT_LAYER", "add_spec_flags", "names_a_spec", "spec_fields", "specs_of"]

DEFAULT_LAYER = "32 query heads, 8 KV heads, head size 128, bfloat16"
_NUMBERS = {
    "num_heads": "query heads",
    "num_kv_heads": "KV heads (default: as many as --num-heads)",
    "head_size": "elements of a head",
    "head_size_v": "elements of a value head, if they differ from those of a key head",
    "block_size": "tokens of a cache block (default 16)",
    "sliding_window": "keys that a query sees, its own included (M2)",
    "attention_chunk_size": "keys of a chunk, which queries of other chunks do not see",
}
_SWITCHES = {
    "has_alibi": "ALiBi slopes",
    "has_sink": "one sink logit for each query head (M4)",
    "token_sinks": "one sink logit for each query token and head (M22)",
    "allow_fp8_queries": "queries may be rounded to float8 over a float8 cache",
    "use_mla": "the cache holds latents (P10)",
    "needs_lse": "the log-sum-exp is returned, too",
    "kv_sharing": "the layer reads the cache of another layer and writes none",
    "batch_invariant": "bits do not depend on the other requests of a batch (M15)",
}
_WORDS = (
    "kv_cache_dtype",
    "kv_scale_kind",
    "kv_rotation",
    "kv_cache_layout",
    "logits_soft_cap",
    "attn_type",
    "mask_kind",
    "dtype",
)


def add_spec_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and one flag for each field of a spec."""
    parser.add_argument(
        "--config",
        type=input_path,
        metavar="PATH",
        help="a Hugging Face config.json or its folder; the flags below override it",
    )
    spec = parser.add_argument_group(f"the spec (default: {DEFAULT_LAYER})")
    for name, about in _NUMBERS.items():
        spec.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=about)
    spec.add_argument("--dtype", type=model_dtype, help="bfloat16, float16 or float32")
    spec.add_argument(
        "--kv-cache-dtype",
        metavar="FORMAT",
        help=", ".join(KV_CACHE_DTYPES) + "; KEYS,VALUES for two, as int8_per_token_head,nvfp4",
    )
    spec.add_argument(
        "--kv-scale-kind",
        choices=("tensor", "head"),
        help="scales of a float8 cache: one, or one for each KV head",
    )
    spec.add_argument("--kv-rotation", metavar="ROTATION", help=", ".join(KV_ROTATIONS) + " (P15)")
    spec.add_argument(
        "--kv-cache-layout",
        type=str.upper,
        choices=tuple(dict.fromkeys((*LAYOUTS, *PAGE_LAYOUTS))),
        help="memory layout of the cache (P2; default: the one that the backend prefers)",
    )
    spec.add_argument(
        "--logits-soft-cap", type=float, metavar="CAP", help="soft cap of the scores (M3)"
    )
    spec.add_argument(
        "--compressed-entries",
        metavar="ENTRIES",
        help="a second key stream: RATE:BLOCK_SIZE for all entries or RATE:BLOCK_SIZE:MAX_SELECTED "
        "for selected ones, for example 4:64:512",
    )
    spec.add_argument(
        "--key-selection",
        metavar="LISTS",
        help="lists of selected keys: SCOPE:BLOCK_SIZE:MAX_BLOCKS, for example kv_head:128:16",
    )
    spec.add_argument(
        "--attn-type",
        choices=[kind.value for kind in AttentionType],
        help="where keys come from (default decoder)",
    )
    spec.add_argument(
        "--mask-kind",
        choices=[kind.value for kind in MaskKind],
        help="which keys a query sees (default causal)",
    )
    for name, about in _SWITCHES.items():
        flag = f"--{name.replace('_', '-')}"
        spec.add_argument(flag, action="store_true", default=None, help=about)


def names_a_spec(options: argparse.Namespace) -> bool:
    """True if any of the flags was given."""
    return bool(options.config or spec_fields(options))


def specs_of(options: argparse.Namespace) -> dict[str, AttentionSpec]:
    """Kind of layer -> spec: from the config, or from the flags alone under the name "".

    Raises:
        ContractError: a field that no layer can have.
    """
    fields = spec_fields(options)
    if options.config:
        return specs_from_config(options.config, **fields)
    heads = {} if "num_heads" in fields else {"num_heads": 32, "num_kv_heads": 8}
    return {"": AttentionSpec(**{**heads, "head_size": 128, "dtype": torch.bfloat16, **fields})}


def spec_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Field -> value of the flags that were given.

    Raises:
        ContractError: --key-selection or --compressed-entries does not parse.
    """
    names = (*_NUMBERS, *_SWITCHES, *_WORDS)
    fields = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    keys, _, values = str(fields.get("kv_cache_dtype", "")).partition(",")
    if values:
        fields |= {"kv_cache_dtype": keys.strip(), "value_cache_dtype": values.strip()}
    if options.key_selection:
        fields["key_selection"] = KeySelection.parse(options.key_selection)
    if options.compressed_entries:
        fields["compressed_entries"] = CompressedEntries.parse(options.compressed_entries)
    return fields
