"""Cases in a grammar for the command line.

Grammar: `BATCH[@KEY=VALUE,...]`, where BATCH is the grammar of `attnlib.testing.batch_spec`:

    32q1s4k                                  32 decodes with 4096 keys, 32/8 heads of 128,
                                             blocks of 16, bfloat16
    32q1s8k@heads=64/8,d=64,window=128,sinks
    q1s1024k@heads=64/4,select=kv_head:128:16   16 selected blocks of 128 tokens per KV head
    32q1s4k@heads=16/1,d=576,dv=512,mla      latents, whose first 512 elements are the values
    q16k@page=128,kv=fp8_e4m3
    32q1s4k@kv=int8_per_token_head,v=int4_per_group,rotation=hadamard
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnlib.bench.case import BenchCase, check_case
from attnlib.errors import ContractError
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.testing.batch_spec import parse_batch

__all__ = ["parse_case"]


def _pair(text: str) -> dict[str, Any]:
    heads, _, kv_heads = text.partition("/")
    return {"num_heads": int(heads), "num_kv_heads": int(kv_heads or heads)}


def _select(text: str) -> dict[str, Any]:
    selection = KeySelection.parse(text)
    return {"select": (selection.scope.value, selection.block_size, selection.max_blocks)}


def _entries(text: str) -> dict[str, Any]:
    form = CompressedEntries.parse(text)
    most = 0 if form.selection is None else form.selection.max_blocks
    return {"entries": (form.compress_rate, form.block_size, most)}


_KEYS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "heads": _pair,
    "d": lambda text: {"head_size": int(text)},
    "dv": lambda text: {"head_size_v": int(text)},
    "page": lambda text: {"block_size": int(text)},
    "window": lambda text: {"sliding_window": int(text)},
    "cap": lambda text: {"logits_soft_cap": float(text)},
    "sinks": lambda text: {"sinks": text not in ("0", "no")},
    "causal": lambda text: {"causal": text not in ("0", "no")},
    "unpaged": lambda text: {"unpaged": text not in ("0", "no")},
    "mla": lambda text: {"mla": text not in ("0", "no")},
    "score": lambda text: {"score": text},
    "select": _select,
    "entries": _entries,
    "dtype": lambda text: {"dtype": text},
    "kv": lambda text: {"kv_cache_dtype": text},
    "v": lambda text: {"value_cache_dtype": text},
    "rotation": lambda text: {"kv_rotation": text},
    "invariant": lambda text: {"batch_invariant": text not in ("0", "no")},
    "fp8q": lambda text: {"fp8_queries": text not in ("0", "no")},
}


def parse_case(text: str) -> BenchCase:
    """Parse a case; its name is the text.

    Raises:
        ContractError: a batch or key that does not parse, or invalid sizes; the message lists the
            keys.
    """
    batch, _, settings = text.partition("@")
    fields: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in _KEYS:
            raise ContractError(
                f"case {text!r}: {key!r} is not a setting; write BATCH@KEY=VALUE,... with "
                f"{', '.join(_KEYS)}"
            )
        try:
            fields.update(_KEYS[key](value))
        except ValueError:
            raise ContractError(
                f"case {text!r}: {setting!r} does not parse; {key} takes a number (heads: QUERY/KV)"
            ) from None
    case = BenchCase(name=text, batch=parse_batch(batch), **fields)
    check_case(case)
    return case
