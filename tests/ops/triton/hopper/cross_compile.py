"""Compile the Hopper kernels without a GPU, through their launchers, and read the output of ptxas.

`python -m tests.ops.triton.hopper.cross_compile CASE...` prints one JSON line per case. It needs a
process that does not interpret Triton.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager

from attnlib.backends.triton.tune import parse_tiles
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.kv_rotation import KVRotation
from attnlib.ops.packed_latents import packed_views
from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import Segment
from attnlib.ops.shared_decode_schedule import schedule_items
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.entry_stream import EntryStream
from attnlib.ops.triton.heuristics.hopper_decode_tiles import (
    choose_hopper_decode_tile,
    decode_shared_bytes,
)
from attnlib.ops.triton.heuristics.hopper_tiles import (
    SHARED_MEMORY,
    HopperTile,
    choose_hopper_tile,
    shared_bytes,
    with_short_ranges,
)
from attnlib.ops.triton.heuristics.tile_table import TileEntry, shipped_tables
from attnlib.ops.triton.hopper.converted_prefill import FLOAT8_TILE
from attnlib.ops.triton.hopper.decode_plan import prepare_hopper_decode
from attnlib.ops.triton.hopper.descriptors import TransposedView
from attnlib.ops.triton.hopper.invariant_plan import (
    prepare_hopper_invariant_decode,
    prepare_hopper_invariant_prefill,
)
from attnlib.ops.triton.hopper.latent_plan import prepare_latent_decode
from attnlib.ops.triton.hopper.latent_tiles import (
    CONVERTED_COLUMNS,
    HALVED,
    ONE_WORKER,
)
from attnlib.ops.triton.hopper.prefill_plan import prepare_hopper_prefill
from attnlib.ops.triton.hopper.shared_decode_launches import SharedDecodeCall
from attnlib.ops.triton.hopper.shared_decode_plan import prepare_shared_decode, shared_decode_tile
from attnlib.ops.triton.launch.run import run_attention
from attnlib.ops.triton.launch.score import has_head_bounds, has_short_ranges
from attnlib.ops.triton.selected_attention import selected_attention
from attnlib.ops.triton.two_streams import two_stream_attention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.tuning.rankings import shipped_tunings
from tests.ops.triton.cross_compile import (
    TARGETS,
    Launch,
    collect_rarely,
    score_options,
    stub_target,
)
from tests.ops.triton.sass import descriptor_sources, disassemble

__all__ = [
    "CASES", "INVARIANT_CASES", "LATENT_CASES", "SCORE_CASES", "SELECTED_CASES",
    "SHARED_CASES", "STREAM_CASES", "compile_case",
    "entry_cases", "problem_of",
]  # fmt: skip

_LOG = "ptxas.log"
BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPLITS: dict[str, Any] = {"splits": 4, "tile": {"sign_softmax": True}}
PAIR: dict[str, Any] = {
    "op": "hopper_decode",
    "cache": torch.int8,
    "values": torch.uint8,
    "scales": "tokens",
    "v_scales": "groups",
}
NVFP4 = {**PAIR, "v_scales": "nvfp4"}
FLOAT4: dict[str, dict[str, Any]] = {
    name: {
        "op": "hopper_decode",
        "cache": torch.uint8,
        "scales": name,
        "tile": {"block_n": 32, "stages": 3, "warps": 8},
    }
    for name in ("nvfp4", "mxfp4")
}
STORED = {
    "tokens": PAGE_FORMATS["int8_per_token_head"],
    "groups": PAGE_FORMATS["int4_per_group"],
    **{name: PAGE_FORMATS[name] for name in FLOAT4},
}
"""Formats by the kind of their scales."""
FLOAT4_ALL: dict[str, Any] = {
    "group": 8,
    "sinks": True,
    "cap": 50.0,
    "lse": True,
    "window": (4095, 31),
    "chunk": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "128": {},
    "128-page32": {"n": 32},
    "128-page64": {"n": 64},
    "128-page128": {"n": 128},
    "128-page256": {"n": 256},
    "128-page8": {"n": 8},
    "128-page1": {"n": 1},
    "128-fp16": {"dtype": FP16},
    "128-bidirectional": {"causal": False},
    "128-group1": {"group": 1},
    "128-group5": {"group": 5},
    "128-lse": {"lse": True},
    "128-window": {"window": (127, 0)},
    "128-sinks-cap": {"sinks": True, "cap": 50.0, "lse": True},
    "128-all": {"sinks": True, "cap": 50.0, "lse": True, "window": (127, 31), "chunk": 8192},
    "128-static": {"tile": {"persistent": False, "q_stages": 1}},
    "128-direct-store": {"tile": {"staged_store": False}},
    "128-leads": {"tile": {"sign_softmax": True}},
    "64": {"d": 64, "group": 8},
    "64-three-consumers": {
        "d": 64,
        "group": 8,
        "sinks": True,
        "tile": {"consumers": 3, "consumer_registers": 160, "producer_registers": 24},
    },
    "64-three-consumers-cap": {
        "d": 64,
        "cap": 50.0,
        "tile": {"consumers": 3, "consumer_registers": 160, "producer_registers": 24},
    },
    "64-sinks-window": {"d": 64, "group": 8, "sinks": True, "window": (127, 0)},
    "64-sinks-bf16": {"d": 64, "group": 8, "sinks": True, "sinks_dtype": BF16},
    "80": {"d": 80},
    "96": {"d": 96},
    "112-fp16-page128": {"d": 112, "dtype": FP16, "n": 128},
    "96-lse": {"d": 96, "lse": True},
    "96-static": {"d": 96, "tile": {"persistent": False, "q_stages": 1}},
    "192-128": {"d": 192, "dv": 128, "group": 1},
    "192-128-leads": {"d": 192, "dv": 128, "group": 1, "tile": {"sign_softmax": True}},
    "192": {"d": 192},
    "192-leads": {"d": 192, "tile": {"sign_softmax": True}},
    "160-all": {
        "d": 160,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (127, 31),
        "chunk": 8192,
    },
    "136-group5-page128": {"d": 136, "group": 5, "n": 128},
    "176-fp16-splits": {**SPLITS, "d": 176, "dtype": FP16},
    "256": {"d": 256, "group": 2},
    "512": {"d": 512, "group": 8, "lse": True},
    "512-group5-page1": {"d": 512, "group": 5, "n": 1, "lse": True},
    "256-page128-cap": {"d": 256, "group": 2, "n": 128, "cap": 50.0},
    "128-splits": {**SPLITS},
    "128-splits-all": {
        **SPLITS,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "chunk": 8192,
    },
    "64-splits-sinks": {**SPLITS, "d": 64, "group": 8, "sinks": True},
    "96-splits": {**SPLITS, "d": 96},
    "192-128-splits": {**SPLITS, "d": 192, "dv": 128, "group": 1},
    "256-splits": {**SPLITS, "d": 256, "group": 2},
    "512-splits": {**SPLITS, "d": 512, "group": 8},
    "128-e4m3": {"cache": E4M3},
    "128-e5m2-page128": {"cache": E5M2, "n": 128, "scales": "tensor"},
    "128-e4m3-fp16": {"cache": E4M3, "dtype": FP16, "group": 5},
    "128-e4m3-all": {
        "cache": E4M3,
        "scales": "heads",
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (127, 31),
        "chunk": 8192,
    },
    "128-unpaged-scales": {"unpaged": True, "scales": "heads"},
    "64-e4m3-sinks": {"cache": E4M3, "d": 64, "group": 8, "sinks": True},
    "256-e4m3": {"cache": E4M3, "d": 256, "group": 2},
    "decode-128": {"op": "hopper_decode"},
    "decode-128-page128": {"op": "hopper_decode", "n": 128},
    "decode-128-page1": {"op": "hopper_decode", "n": 1},
    "decode-128-page1-e4m3": {
        "op": "hopper_decode",
        "n": 1,
        "cache": E4M3,
        "tile": {"block_n": 128, "stages": 3},
    },
    "decode-64-page2-e5m2-all": {
        "op": "hopper_decode",
        "n": 2,
        "cache": E5M2,
        "d": 64,
        "group": 8,
        "query": 4,
        "lse": True,
        "tile": {"block_n": 128, "stages": 6},
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31)},
    },
    "decode-128-page8-e4m3": {"op": "hopper_decode", "n": 8, "cache": E4M3},
    "decode-128-combine-page1": {"op": "hopper_decode", "reqs": 16, "n": 1},
    "decode-512": {"op": "hopper_decode", "d": 512, "group": 8},
    "decode-128-mqa": {"op": "hopper_decode", "group": 32},
    "decode-128-verify": {"op": "hopper_decode", "query": 4},
    "decode-128-most-rows": {"op": "hopper_decode", "group": 8, "query": 8},
    "decode-256-most-rows": {"op": "hopper_decode", "d": 256, "group": 4, "query": 8},
    "decode-128-all": {
        "op": "hopper_decode",
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "chunk": 8192,
    },
    "decode-128-combine": {"op": "hopper_decode", "reqs": 16, "lse": True},
    "decode-128-combine-verify": {"op": "hopper_decode", "reqs": 16, "query": 4},
    "decode-128-combine-one-row": {"op": "hopper_decode", "reqs": 16, "group": 1},
    "decode-256-combine-sinks": {
        "op": "hopper_decode",
        "reqs": 16,
        "d": 256,
        "group": 2,
        "sinks": True,
    },
    "decode-64-combine-sinks": {
        "op": "hopper_decode",
        "reqs": 16,
        "d": 64,
        "group": 8,
        "sinks": True,
        "dtype": FP16,
    },
    "decode-64-sinks": {"op": "hopper_decode", "d": 64, "group": 8, "sinks": True, "dtype": FP16},
    "decode-64-sinks-bf16": {
        "op": "hopper_decode",
        "reqs": 16,
        "d": 64,
        "group": 8,
        "sinks": True,
        "sinks_dtype": BF16,
    },
    "decode-192-128": {"op": "hopper_decode", "d": 192, "dv": 128, "group": 1},
    "decode-256-cap": {"op": "hopper_decode", "d": 256, "group": 2, "cap": 50.0},
    "packed-decode-128": {"op": "hopper_decode", "packed": True},
    "packed-decode-128-page128": {"op": "hopper_decode", "packed": True, "n": 128},
    "packed-decode-64-page32": {
        "op": "hopper_decode",
        "packed": True,
        "d": 64,
        "n": 32,
        "dtype": FP16,
    },
    "packed-decode-80-mqa": {"op": "hopper_decode", "packed": True, "d": 80, "group": 32},
    "packed-decode-256": {"op": "hopper_decode", "packed": True, "d": 256, "group": 2},
    "packed-decode-256-most-rows": {"op": "hopper_decode", "packed": True, "d": 256, "group": 32},
    "packed-decode-128-64keys": {
        "op": "hopper_decode",
        "packed": True,
        "tile": {"block_n": 64, "stages": 2},
    },
    "decode-128-e4m3": {"op": "hopper_decode", "cache": E4M3},
    "decode-128-e5m2": {"op": "hopper_decode", "cache": E5M2, "scales": "tensor"},
    "decode-128-e4m3-fp16": {"op": "hopper_decode", "cache": E4M3, "dtype": FP16},
    "decode-128-e4m3-most-rows": {
        "op": "hopper_decode",
        "cache": E4M3,
        "scales": "heads",
        "group": 8,
        "query": 8,
    },
    "decode-64-e4m3-sinks": {
        "op": "hopper_decode",
        "cache": E4M3,
        "reqs": 16,
        "d": 64,
        "group": 8,
        "sinks": True,
    },
    "decode-128-e4m3-all": {
        "op": "hopper_decode",
        "cache": E4M3,
        "scales": "heads",
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "chunk": 8192,
    },
    "decode-128-e4m3-mqa": {"op": "hopper_decode", "cache": E4M3, "group": 32},
    "decode-128-int8-tokens": {"op": "hopper_decode", "cache": torch.int8, "scales": "tokens"},
    "decode-64-int8-tokens-all": {
        "op": "hopper_decode",
        "cache": torch.int8,
        "scales": "tokens",
        "d": 64,
        "group": 8,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
    },
    "decode-128-int4": {"op": "hopper_decode", "cache": torch.uint8, "scales": "groups"},
    "decode-128-int4-warp": {
        "op": "hopper_decode",
        "cache": torch.uint8,
        "scales": "groups",
        "tile": {"block_n": 64, "stages": 2, "warps": 8},
    },
    "decode-128-int4-warp-all": {
        "op": "hopper_decode",
        "cache": torch.uint8,
        "scales": "groups",
        "tile": {"block_n": 32, "stages": 4, "warps": 8},
        "group": 8,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "chunk": 8192,
    },
    "decode-128-int8-warp": {
        "op": "hopper_decode",
        "cache": torch.int8,
        "scales": "tokens",
        "tile": {"block_n": 32, "stages": 3, "warps": 8},
    },
    "decode-128-int8-int4-warp": {**PAIR, "tile": {"block_n": 64, "stages": 2, "warps": 8}},
    "decode-128-int8-int4-warp-all": {
        **PAIR,
        "tile": {"block_n": 32, "stages": 3, "warps": 8},
        "group": 8,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "chunk": 8192,
    },
    "decode-128-nvfp4": FLOAT4["nvfp4"],
    "decode-128-nvfp4-all": {**FLOAT4["nvfp4"], **FLOAT4_ALL},
    "decode-128-mxfp4": FLOAT4["mxfp4"],
    "decode-128-mxfp4-all": {**FLOAT4["mxfp4"], **FLOAT4_ALL},
    "decode-128-mxfp4-rotated": {**FLOAT4["mxfp4"], "rotation": "hadamard"},
    "decode-128-int8-nvfp4-warp": {**NVFP4, "tile": {"block_n": 32, "stages": 4, "warps": 8}},
    "decode-128-int8-nvfp4-warp-all": {
        **NVFP4,
        "tile": {"block_n": 32, "stages": 3, "warps": 8},
        "group": 8,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "chunk": 8192,
    },
    "decode-128-int8-nvfp4-workers-all": {
        **NVFP4,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "query": 4,
        "tile": {"block_n": 64, "stages": 3, "consumers": 2},
    },
    "decode-128-int8-nvfp4": {**NVFP4, "tile": {"block_n": 64, "stages": 4}},
    "decode-128-int8-int4": {**PAIR, "tile": {"block_n": 64, "stages": 4}},
    "decode-128-int8-int4-workers-all": {
        **PAIR,
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "query": 4,
        "tile": {"block_n": 64, "stages": 3, "consumers": 2},
    },
    "decode-128-int8-int4-rotated-warp": {
        **PAIR,
        "rotation": "hadamard",
        "tile": {"block_n": 64, "stages": 2, "warps": 8},
    },
    "decode-128-int8-rotated": {
        "op": "hopper_decode",
        "cache": torch.int8,
        "scales": "tokens",
        "rotation": "hadamard",
        "tile": {"block_n": 128, "stages": 4},
    },
    "decode-128-int8-rotated-workers": {
        "op": "hopper_decode",
        "cache": torch.int8,
        "scales": "tokens",
        "rotation": "hadamard",
        "reqs": 256,
        "tile": {"block_n": 64, "stages": 3, "consumers": 2},
    },
    "decode-128-int8-rotated-workers-all": {
        "op": "hopper_decode",
        "cache": torch.int8,
        "scales": "tokens",
        "rotation": "hadamard",
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "query": 4,
        "tile": {"block_n": 64, "stages": 3, "consumers": 2},
    },
    "decode-64-e4m3-warp-sinks": {
        "op": "hopper_decode",
        "cache": E4M3,
        "d": 64,
        "group": 8,
        "sinks": True,
        "tile": {"block_n": 64, "stages": 3, "warps": 8},
    },
    "decode-128-e4m3-workers-verify": {
        "op": "hopper_decode",
        "cache": E4M3,
        "scales": "heads",
        "query": 4,
        "tile": {"block_n": 64, "stages": 3, "consumers": 2},
    },
    "decode-128-int8-workers-all": {
        "op": "hopper_decode",
        "cache": torch.int8,
        "scales": "tokens",
        "sinks": True,
        "cap": 50.0,
        "lse": True,
        "window": (4095, 31),
        "query": 4,
        "tile": {"block_n": 64, "stages": 3, "consumers": 2},
    },
    "decode-128-e4m3-tokens-verify": {
        "op": "hopper_decode",
        "cache": E4M3,
        "scales": "tokens",
        "query": 4,
        "reqs": 16,
    },
    "128-float8-products": {
        "unpaged": True,
        "float8": True,
        "cache": E4M3,
        "scales": "heads",
        "lse": True,
    },
    "128-float8-products-window": {
        "unpaged": True,
        "float8": True,
        "cache": E4M3,
        "scales": "tensor",
        "window": (4095, 0),
        "dtype": FP16,
        "n": 128,
    },
    "decode-256-e4m3-most-rows": {
        "op": "hopper_decode",
        "cache": E4M3,
        "d": 256,
        "group": 2,
        "query": 8,
    },
}


SCORE_NAMES = (
    "positions",
    "linear",
    "heads",
    "requests",
    "spans",
    "documents",
    "relative_bias",
    "alibi_sqrt",
)
SCORE_CASES: dict[str, dict[str, Any]] = {
    **{f"{d}-{name}": {"d": d, "score": name} for d in (64, 128, 256) for name in SCORE_NAMES},
    **{
        f"decode-{d}-{name}": {"op": "hopper_decode", "d": d, "score": name}
        for d in (64, 128, 256)
        for name in SCORE_NAMES
    },
    "decode-128-relative_logits": {"op": "hopper_decode", "score": "relative_logits"},
    "decode-128-documents-combine": {"op": "hopper_decode", "reqs": 16, "score": "documents"},
    "128-e4m3-heads": {"cache": E4M3, "score": "heads"},
    "decode-128-e4m3-heads": {"op": "hopper_decode", "cache": E4M3, "score": "heads"},
    "128-heads-cap": {"score": "heads", "cap": 50.0, "window": (127, 0)},
    **{
        f"{case}-{name}": {**options, "score": name}
        for case, options in {"64": {"d": 64}, "128": {}, "256": {"d": 256, "group": 2}}.items()
        for name in ("multi_item", "head_windows")
    },
    "128-e4m3-multi_item": {"cache": E4M3, "score": "multi_item"},
    "128-e4m3-head_windows": {"cache": E4M3, "score": "head_windows", "scales": "heads"},
    "decode-128-multi_item": {"op": "hopper_decode", "score": "multi_item"},
}
"""Cases with a score function, apart from `CASES`, whose machine code is compared over time."""


INVARIANT_CASES: dict[str, dict[str, Any]] = {
    "invariant-128": {},
    "invariant-64-sinks-cap": {"d": 64, "group": 8, "sinks": True, "cap": 50.0, "lse": True},
    "invariant-96-group5-window": {"d": 96, "group": 5, "window": (127, 0)},
    "invariant-64-window": {"d": 64, "group": 8, "window": (127, 0), "sinks": True},
    "invariant-256": {"d": 256, "group": 2},
    "invariant-decode-128": {"op": "hopper_decode"},
    "invariant-decode-256-verify": {"op": "hopper_decode", "d": 256, "group": 2, "query": 4},
    "invariant-decode-64-window": {
        "op": "hopper_decode", "d": 64, "group": 8, "window": (127, 0), "sinks": True,
    },
    "invariant-decode-128-window-verify": {
        "op": "hopper_decode", "query": 8, "window": (255, 0), "cap": 50.0, "lse": True,
    },
    "invariant-decode-128-cap-verify": {
        "op": "hopper_decode", "query": 8, "cap": 50.0, "lse": True,
    },
}  # fmt: skip
"""Cases of the batch-invariant kernels."""


def _compile_invariant(options: dict[str, Any]) -> dict[str, Any]:
    """Compile a case of `INVARIANT_CASES`; returns what `compile_case` does, without estimate."""
    d, heads, decode = options.get("d", 128), 8 * options.get("group", 4), "op" in options
    query = torch.empty(64, heads, d, dtype=BF16)
    cache = torch.empty(2, 16, 8, d, dtype=BF16)
    lengths = torch.zeros(3, dtype=torch.int32)
    batch = BatchTensors(lengths, lengths[:2], torch.zeros(2, 4, dtype=torch.int32))
    params = AttentionParams(
        scale=0.1,
        window=options.get("window", (-1, -1)),
        logits_soft_cap=options.get("cap", 0.0),
        sinks=torch.empty(heads) if options.get("sinks") else None,
    )
    lse = torch.empty(64, heads) if options.get("lse") else None
    tensors = (query, cache, cache, torch.empty_like(query), lse, batch, params)

    def run() -> None:
        call = AttentionCall.of(*tensors)
        prepared: Any = prepare_hopper_invariant_prefill(call)
        if decode:
            prepared = prepare_hopper_invariant_decode(call, options.get("query", 1), 8)
        run_attention(prepared, call)

    (launch, *_), facts = _compiled(run)
    return {
        **facts,
        "loops": _key_loops(launch.kernel.asm["cubin"], (4,) if decode else (2,), True),
    }


def _compiled(run: Callable[[], None]) -> tuple[list[Launch], dict[str, Any]]:
    """Compile the kernels that `run` launches; return the launches and `_facts` of the first one.

    The log of ptxas is kept beside the kernel in Triton's cache, so that a kernel that has been
    compiled there is not compiled again.
    """
    triton.knobs.nvidia.dump_ptxas_log = True
    with stub_target("sm_90") as launches:
        run()
    launch = launches[0]
    sums = sum((_sums_of_products(each.kernel.asm["ptx"]) for each in launches), [])
    kept = get_cache_manager(launch.kernel.hash)
    if launch.log:
        kept.put(launch.log, _LOG)
        return launches, {**_facts(launch, launch.log), "sums": sums, "cached": False}
    path = kept.get_file(_LOG)
    log = Path(path).read_text() if path else ""
    if f"'{launch.kernel.metadata.name}'" in log:
        return launches, {**_facts(launch, log), "sums": sums, "cached": True}
    # Compiled by another program, without its log.
    launch.kernel.src.fn.device_caches.clear()
    triton.knobs.compilation.always_compile = True
    try:
        return _compiled(run)
    finally:
        triton.knobs.compilation.always_compile = False


SHARED_CASES: dict[str, dict[str, Any]] = {
    "shared-decode-128": {},
    "shared-decode-64-group8-sinks": {"d": 64, "group": 8, "sinks": True, "lse": True},
    "shared-decode-112-group5-cap-page128": {"d": 112, "group": 5, "n": 128, "cap": 50.0},
    "shared-decode-128-fp16-group1-page256": {"dtype": FP16, "group": 1, "n": 256},
}
"""Cases of the decode of shared prefixes."""


def _compile_shared(options: dict[str, Any]) -> dict[str, Any]:
    """Compile a case of `SHARED_CASES`; returns what `compile_case` does, without estimate."""
    d, heads, dtype = options.get("d", 128), 8 * options.get("group", 4), options.get("dtype", BF16)
    query = torch.empty(2, heads, d, dtype=dtype)
    cache = torch.empty(2, options.get("n", 16), 8, d, dtype=dtype)
    params = AttentionParams(
        scale=0.1,
        logits_soft_cap=options.get("cap", 0.0),
        sinks=torch.empty(heads) if options.get("sinks") else None,
    )
    table = torch.zeros(2, 4, dtype=torch.int32)
    limits, lse = TARGETS["sm_90"].limits, torch.empty(2, heads) if options.get("lse") else None
    tile = shared_decode_tile(d, d)
    found = [Segment(request, 0, 8, (request,)) for request in range(2)]
    lists = schedule_items(found, 2, heads // 8, 16, tile.block_n, 16)
    items = lists.to_device(query.device)

    def run() -> None:
        call = SharedDecodeCall(query, cache, cache, table, query, lse, params, limits)
        prepared = prepare_shared_decode(call, tile, items.num_ranges)
        space = prepared.workspace(items, query.device)
        assert prepared.run(query, cache, cache, table, items, params, query, lse, space)

    (launch, *_), facts = _compiled(run)
    return {**facts, "loops": _key_loops(launch.kernel.asm["cubin"], (2,))}


def entry_cases() -> dict[str, TileEntry]:
    """Return the entries of the shipped tables for these kernels by case name, `OP:INDEX`.

    The tables that are common to all chips come first, then those of measured chips.
    """
    of_chips = [parse_tiles(tuning) for _, tuning in shipped_tunings()]
    entries = [
        entry
        for table in (*shipped_tables(), *of_chips)
        for entry in table.entries
        if entry.op in ("hopper_prefill", "hopper_decode")
    ]
    return {f"{entry.op}:{index}": entry for index, entry in enumerate(entries)}


def _scale(kind: str | None, num_kv_heads: int, block_size: int) -> torch.Tensor | float:
    """Return a scale of a cache: a tensor for "tensor", "heads" and "tokens", else 1.0."""
    if kind == "tokens":
        return torch.ones(2, num_kv_heads, block_size, 1).transpose(1, 2)
    if kind in ("nvfp4", "mxfp4"):  # of heads of 128
        count = 8 if kind == "nvfp4" else 4
        return torch.ones(2, num_kv_heads, block_size, count, dtype=torch.uint8).transpose(1, 2)
    if kind == "groups":
        return torch.ones(2, num_kv_heads, block_size, 4, dtype=FP16).transpose(1, 2)
    sizes = {"tensor": 1, "heads": num_kv_heads}
    return torch.ones(sizes[kind]) if kind else 1.0


def _entry_options(entry: TileEntry) -> dict[str, Any]:
    """Return the options for the largest head size and block size of an entry, with its tile."""
    most = {name: most for name, _, most in entry.ranges}
    size = most.get("head_size") or 256
    return {
        "op": entry.op,
        "d": size,
        # Keys of 192 elements come with values of 128, or have two accumulators.
        "dv": 128 if size == 192 and "two_accumulators" not in dict(entry.tile) else size,
        "n": most.get("block_size") or 16,
        "tile": dict(entry.tile),
        "group": 8 if size == 64 else 4,
        **({"cache": E4M3} if "fp8" in entry.elements else {}),
        **({"cache": torch.uint8, "scales": "groups"} if "int4" in entry.elements else {}),
        **({"cache": torch.int8, "scales": "tokens"} if entry.elements == ("int8",) else {}),
        **(PAIR if "int8-int4" in entry.elements else {}),
        **(NVFP4 if entry.elements == ("int8-fp4",) else {}),
        **(FLOAT4["nvfp4"] if entry.elements == ("fp4",) else {}),
    }


LATENT_CASES: dict[str, dict[str, Any]] = {
    "latent-16": {"heads": 16, "n": 64},
    "latent-5-verify-page16-all": {
        "heads": 5,
        "query": 3,
        "n": 16,
        "dtype": FP16,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-128-page16": {"heads": 128, "n": 16, "dtype": FP16},
    "latent-128": {"heads": 128, "n": 64},
    "latent-5-verify-page256": {"heads": 5, "query": 8, "n": 256},
    "latent-128-verify": {"heads": 128, "query": 2, "n": 64},
    "latent-32-verify-all": {
        "heads": 32,
        "query": 4,
        "n": 16,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-16-e4m3": {"heads": 16, "cache": E4M3},
    "latent-5-verify-page16-e5m2-all": {
        "heads": 5,
        "query": 3,
        "n": 16,
        "cache": E5M2,
        "dtype": FP16,
        "scales": "tensor",
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-32-e4m3-all": {
        "heads": 32,
        "cache": E4M3,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-128-e4m3": {"heads": 128, "cache": E4M3},
    "latent-16-packed": {"heads": 16, "packed": True},
    "latent-32-packed-all": {
        "heads": 32,
        "packed": True,
        "n": 16,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-128-packed": {"heads": 128, "packed": True},
    "latent-128-e4m3-halved": {"heads": 128, "cache": E4M3, "tile": HALVED},
    "latent-32-verify-packed-all": {
        "heads": 32,
        "query": 4,
        "packed": True,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-32-verify-e4m3-all": {
        "heads": 32,
        "query": 4,
        "n": 16,
        "cache": E4M3,
        "scales": "tensor",
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-16-packed-converted": {"heads": 16, "packed": True, "tile": CONVERTED_COLUMNS},
    "latent-32": {"heads": 32},
    "latent-16-e4m3-one-worker": {"heads": 16, "cache": E4M3, "tile": ONE_WORKER},
    "latent-128-prefill": {"heads": 128, "query": 200},
    "latent-5-prefill-page16-all": {
        "heads": 5,
        "query": 3000,
        "n": 16,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "latent-128-prefill-e4m3": {"heads": 128, "query": 200, "cache": E4M3},
    "latent-64-all": {
        "heads": 64,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
}
"""Cases of the decode over latents."""

SELECTED_CASES: dict[str, dict[str, Any]] = {
    "selected-128": {"heads": 128, "tokens": 300},
    "selected-64-splits-page16": {"heads": 64, "tokens": 32, "n": 16},
    "selected-16": {"heads": 16, "tokens": 300},
    "selected-5-splits-page16": {"heads": 5, "tokens": 32, "n": 16},
    "selected-16-splits-lse": {"heads": 16, "tokens": 32, "lse": True},
    "selected-64-splits-lse": {"heads": 64, "tokens": 32, "lse": True},
    "selected-16-all": {
        "heads": 16,
        "tokens": 300,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "selected-16-blocks-all": {
        "heads": 16,
        "tokens": 300,
        "dtype": FP16,
        "lse": True,
        "selection": {"max_blocks": 20, "block_size": 64},
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
    "selected-64-blocks-all": {
        "heads": 64,
        "tokens": 300,
        "dtype": FP16,
        "lse": True,
        "selection": {"max_blocks": 20, "block_size": 64},
        "params": {"logits_soft_cap": 50.0, "window": (4095, 31), "attention_chunk_size": 8192},
    },
}
"""Cases of the kernel over selected latents."""

STREAM_CASES: dict[str, dict[str, Any]] = {
    "streams-64-lists-splits": {"heads": 64, "tokens": 32, "max_blocks": 512},
    "streams-64": {"heads": 64, "tokens": 300},
    "streams-64-many": {"heads": 64, "tokens": 2000},
    "streams-128-lists-all": {
        "heads": 128,
        "tokens": 300,
        "max_blocks": 512,
        "dtype": FP16,
        "lse": True,
        "params": {"logits_soft_cap": 50.0, "window": (127, 31), "causal": False},
    },
}
"""Cases of the kernel over two key streams."""


def _compile_streams(options: dict[str, Any]) -> dict[str, Any]:
    """Compile a case of `STREAM_CASES`; returns what `compile_case` does, without estimate."""
    heads, tokens, dtype = options["heads"], options["tokens"], options.get("dtype", BF16)
    latents = torch.empty(2, 64, 1, 512, dtype=dtype)
    given = {"window": (127, 0), "sinks": torch.empty(heads), **options.get("params", {})}
    selection = lists = None
    if "max_blocks" in options:
        selection = KeySelection(max_blocks=options["max_blocks"])
        lists = SelectedKeys(torch.zeros(tokens, 1, selection.max_blocks, dtype=torch.int32))
    starts = torch.zeros(tokens + 1, dtype=torch.int32)
    table = torch.zeros(tokens, 4, dtype=torch.int32)
    entries = EntryStream(
        *(latents, latents, 1.0, 1.0, table, starts[:tokens], 256, selection, lists)
    )

    def run() -> None:
        computed = two_stream_attention(
            torch.empty(tokens, heads, 512, dtype=dtype),
            *(latents, latents, torch.zeros(2, 4, dtype=torch.int32)),
            *(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
            AttentionParams(scale=0.1, **given),
            entries,
            out=torch.empty(tokens, heads, 512, dtype=dtype),
            lse=torch.empty(tokens, heads) if options.get("lse") else None,
        )
        assert computed

    return _compiled(run)[1]


def _compile_latent(options: dict[str, Any]) -> dict[str, Any]:
    """Compile a case of `LATENT_CASES` or `SELECTED_CASES`; returns what `compile_case` does,
    without estimate, and accesses to local memory in loops over keys: `repeat_loops`, of the second
    launch over selected latents, and `tile_loops`, of decodes over 8-bit latents."""
    heads, dtype = options["heads"], options.get("dtype", BF16)
    tokens = options.get("tokens", 64)
    lengths = torch.zeros(2, dtype=torch.int32)
    key = torch.empty(2, options.get("n", 64), 1, 576, dtype=options.get("cache", dtype))
    value = key[..., :512]
    if options.get("packed"):
        parts = packed_views(torch.empty(2, options.get("n", 64), 656, dtype=torch.uint8))
        key, value = parts.rotary.unsqueeze(2), parts.elements.unsqueeze(2)
    sinks = torch.empty(heads) if "params" in options else None
    scale = _scale(options.get("scales"), 1, key.shape[1])
    params = AttentionParams(
        scale=0.1, sinks=sinks, k_scale=scale, v_scale=scale, **options.get("params", {})
    )
    inputs = (
        torch.empty(tokens, heads, 576, dtype=dtype),
        key,
        value,
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        lengths,
        params,
    )
    outputs = {
        "out": torch.empty(tokens, heads, 512, dtype=dtype),
        "lse": torch.empty(tokens, heads) if options.get("lse") else None,
    }

    def run() -> None:
        if "tokens" in options:
            selection = KeySelection(**options.get("selection", {"max_blocks": 2048}))
            lists = torch.zeros(tokens, 1, selection.max_blocks, dtype=torch.int32)
            selected_attention(*inputs, selection, SelectedKeys(lists), kernels="hopper", **outputs)
        else:
            query, key, value, table, starts, lens, params = inputs
            batch = BatchTensors(starts, lens, table, workspace=torch.empty(1 << 25))
            tensors = (query, key, value, outputs["out"], outputs["lse"])
            call = AttentionCall.of(*tensors, batch, params)
            tile = options.get("tile")
            prepared = prepare_latent_decode(call, options.get("query", 1), None, tile)
            run_attention(prepared, call)

    (first, *repeats), facts = _compiled(run)
    cubins = [launch.kernel.asm["cubin"] for launch in repeats if "cubin" in launch.kernel.asm]
    # Groups of products of halves of quarters with keys, with values and with the other elements.
    tiles = _key_loops(first.kernel.asm["cubin"], (17, 20))
    return {
        **facts,
        "repeat_loops": [_key_loops(cubin, (9,)) for cubin in cubins],
        "tile_loops": tiles,
    }


def _options(name: str) -> dict[str, Any]:
    """Return the options of a case or of a table entry."""
    known = CASES | SCORE_CASES
    return known[name] if name in known else _entry_options(entry_cases()[name])


def _bits(cache: torch.dtype) -> int:
    """Return the bits of an element; bytes hold two 4-bit integers."""
    return 4 if cache == torch.uint8 else 8 * cache.itemsize


def tile_of(name: str) -> Any:
    """Return the tile of a case or of a table entry."""
    options = _options(name)
    d, cache = options.get("d", 128), options.get("cache", options.get("dtype", BF16))
    sizes = (d, options.get("dv", d))
    if options.get("op") == "hopper_decode":
        rows = options.get("group", 4) * options.get("query", 1)
        in_page = "values" in options or cache == torch.uint8
        chosen: Any = choose_hopper_decode_tile(
            *sizes,
            cache_bits=8 * cache.itemsize,
            stored=STORED[options["scales"]] if in_page else None,
            values=STORED[options["v_scales"]] if "v_scales" in options else None,
            rows=rows,
            one_warp=options["scales"] in FLOAT4 if in_page else False,
        )
    elif options.get("float8"):
        return FLOAT8_TILE
    elif name in entry_cases():
        # Entries for more rows may precede this one, so it is not the tile of its own problem.
        return HopperTile(**options["tile"])
    else:
        has_score = "score" in options
        chosen = choose_hopper_tile(
            *sizes, cache_bytes=cache.itemsize, block_size=options.get("n", 16), has_score=has_score
        )
    return dataclasses.replace(chosen, **options.get("tile", {}))


def problem_of(name: str) -> tuple[Any, int]:
    """Return what the tiles of a kernel in registers and shared memory depend on, and the head
    size, with which they grow. Cases for which both are equal differ in their features only."""
    options = _options(name)
    cache = options.get("cache", options.get("dtype", BF16))
    bits = _bits(cache), _bits(options.get("values", cache))
    kernel = (options.get("op", "hopper_prefill"), bits, options.get("packed", False))
    return (*kernel, tile_of(name)), options.get("d", 128)


def compile_case(name: str) -> dict[str, Any]:
    """Compile one case.

    Returns:
        shared, estimate: bytes of shared memory, and their estimate for the tile choice.
        registers, stack, spilled: registers and bytes of local memory per thread.
        loops: accesses to local memory in each loop over keys.
        warnings: warnings of ptxas.
        wgmma: number of WGMMA instructions in the PTX.
        sums: what `_sums_of_products` finds in all kernels of the case.
        cached: whether the kernel was in Triton's cache.
        seconds: compile time.
    """
    if name in LATENT_CASES or name in SELECTED_CASES:
        return _compile_latent((LATENT_CASES | SELECTED_CASES)[name])
    if name in STREAM_CASES:
        return _compile_streams(STREAM_CASES[name])
    if name in INVARIANT_CASES:
        return _compile_invariant(INVARIANT_CASES[name])
    if name in SHARED_CASES:
        return _compile_shared(SHARED_CASES[name])
    options, tile = _options(name), tile_of(name)
    d, dtype, kv_heads = options.get("d", 128), options.get("dtype", BF16), 8
    cache = options.get("cache", dtype)
    values_dtype = options.get("values", cache)
    bits = _bits(cache)
    dv, heads = options.get("dv", d), options.get("group", 4) * kv_heads
    decode = options.get("op") == "hopper_decode"
    has_score, float8 = "score" in options, options.get("float8")
    lengths = torch.zeros(options.get("reqs", 2), dtype=torch.int32)
    block_size = options.get("n", 16)
    cache_shapes = [
        (2, block_size, kv_heads, size * _bits(side) // (8 * side.itemsize))
        for size, side in ((d, cache), (dv, values_dtype))
    ]
    if options.get("packed"):
        cache_shapes = [(2, kv_heads, d // 8, block_size, 8), (2, kv_heads, d, block_size)]
    shapes = (
        torch.empty(lengths.shape[0] if options.get("packed") else 64, heads, d, dtype=dtype),
        torch.empty(cache_shapes[0], dtype=cache),
        torch.empty(cache_shapes[1], dtype=values_dtype),
        torch.zeros(lengths.shape[0], 4, dtype=torch.int32),
        torch.zeros(lengths.shape[0] + 1, dtype=torch.int32),
        lengths,
    )
    sinks_dtype = options.get("sinks_dtype", torch.float32)
    params = AttentionParams(
        scale=0.1,
        causal=options.get("causal", True),
        window=options.get("window", (-1, -1)),
        attention_chunk_size=options.get("chunk", 0),
        logits_soft_cap=options.get("cap", 0.0),
        sinks=torch.empty(heads, dtype=sinks_dtype) if options.get("sinks") else None,
        k_scale=_scale(options.get("scales"), kv_heads, block_size),
        v_scale=_scale(options.get("v_scales", options.get("scales")), kv_heads, block_size),
        rotation=KVRotation.of(options.get("rotation")),
    )
    if has_score:
        score = score_options(options["score"], heads, lengths.shape[0])
        params = dataclasses.replace(params, **score)
        if not decode and has_short_ranges(params, has_head_bounds(params)):
            tile = with_short_ranges(tile)
    outputs: dict[str, Any] = {
        "out": torch.empty(shapes[0].shape[0], heads, dv, dtype=dtype),
        "lse": torch.empty(64, heads) if options.get("lse") else None,
    }
    counters = torch.zeros(1024, dtype=torch.int32) if "reqs" in options else None

    def run() -> None:
        if decode:
            query, keys, values, table, starts, lens = shapes
            batch = BatchTensors(
                starts, lens, table, workspace=torch.empty(1 << 24), counters=counters,
                score_tensors=params.batch_score_tensors(),
            )  # fmt: skip
            call = AttentionCall.of(query, keys, values, *outputs.values(), batch, params)
            num_counters = 0 if counters is None else counters.numel()
            run_attention(
                prepare_hopper_decode(
                    call, tile, options.get("query", 1), num_counters=num_counters
                ),
                call,
            )
        elif options.get("unpaged"):
            # Copies of a quantized cache, whose scales are tensors.
            query, keys, values, _, starts, _ = shapes
            keys, values = keys.flatten(0, 1).unsqueeze(0), values.flatten(0, 1).unsqueeze(0)
            batch = BatchTensors(starts, starts, starts.unsqueeze(1), max_seq_len=64)
            out, lse = outputs.values()
            transposed = TransposedView((kv_heads * dv, 1024), (dv, 128)) if float8 else None
            call = AttentionCall.of(query, keys, values, out, lse, batch, params)
            prepared = prepare_hopper_prefill(call, tile, unpaged=True, transposed=transposed)
            run_attention(prepared, call)
        else:
            query, keys, values, table, starts, lens = shapes
            score_tensors = params.batch_score_tensors()
            batch = BatchTensors(starts, lens, table, max_seq_len=64, score_tensors=score_tensors)
            call = AttentionCall.of(query, keys, values, *outputs.values(), batch, params)
            one_head = has_head_bounds(params)
            splits = options.get("splits", 1)
            prepared = prepare_hopper_prefill(call, tile, one_head=one_head, num_splits=splits)
            run_attention(prepared, call)

    (launch, *_), facts = _compiled(run)
    return {
        **facts,
        "estimate": decode_shared_bytes(tile, d, dv, bits, _bits(values_dtype))
        if decode
        else SHARED_MEMORY
        if float8
        else shared_bytes(tile, d, dv, has_score),
        "loops": _key_loops(launch.kernel.asm["cubin"], (4, 6, 12) if decode else (2, 3, 4, 5, 6)),
    }


def _facts(launch: Launch, text: str) -> dict[str, Any]:
    """What the launch and the log of ptxas tell about a kernel."""
    assert f"'{launch.kernel.metadata.name}'" in text, text
    spills = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    assert spills is not None, text
    used = re.search(r"Used (\d+) registers", text)
    assert used is not None, text
    ptx = launch.kernel.asm["ptx"]
    return {
        "shared": launch.kernel.metadata.shared,
        "registers": int(used[1]),
        "stack": int(spills[1]),
        "spilled": int(spills[2]),
        "warnings": [
            line for line in text.splitlines() if re.search(r"C75\d\d|serializ|[Ww]arning", line)
        ],
        "wgmma": ptx.count("wgmma.mma_async"),
        "columns": sorted({int(n) for n in re.findall(r"wgmma\S*m64n(\d+)k16", ptx)}),
        "marks": _marks(ptx),
        "overlapped": _overlapped(launch.kernel.asm["cubin"]),
        "releases": _releases(launch.kernel.asm["cubin"]),
        "descriptors": sorted(descriptor_sources(disassemble(launch.kernel.asm["cubin"]))),
        "seconds": round(launch.seconds, 1),
    }


def _sums_of_products(ptx: str) -> list[str]:
    """Return the fused operations of which LLVM may have chosen the product that it rounds: those
    that add a product to a product. Constants are factors of polynomials, which are written so."""
    products = set(re.findall(r"mul\.f32\s+(%r\d+),", ptx))
    fused = re.findall(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, (%r\d+);", ptx)
    return [addend for addend in fused if addend in products]


def _overlapped(cubin: bytes) -> int:
    """Return the exponentials between the wait for all products but one and that for the last one,
    in the loop over keys that has the fewest; 0 without such a loop."""
    counts = re.findall(
        r"DEPBAR\.LE gsb0, 0x1 ;(.*?)DEPBAR\.LE gsb0, 0x0 ;", disassemble(cubin), re.DOTALL
    )
    return min((between.count("MUFU.EX2") for between in counts), default=0)


def _releases(cubin: bytes) -> list[bool]:
    """Return whether a group of products is issued between the last load from shared memory before
    an arrival of each thread and the arrival, for each of those that follow products."""
    found = []
    lines = disassemble(cubin).splitlines()
    for index, line in enumerate(lines):
        if "ARRIVES.LDGSTSBAR" not in line:
            continue
        for before in reversed(lines[:index]):
            if "LDGSTS" in before and "ARRIVES" not in before:
                break  # an arrival after copies
            if "GMMA" in before and "gsb0" in before:
                found.append(True)
                break
            if re.search(r"\bLDS", before):
                found.append(False)
                break
    return found


def _marks(ptx: str) -> list[int]:
    """Return where `value_columns.check_offset` stores its marks through Gluon, and where it reads
    them by address, as offsets in shared memory; empty in kernels without it."""
    mark = 0x4B7D4B7D
    values = "|".join([str(mark), *re.findall(rf"mov\.b32\s+(%r\d+), {mark};", ptx)])
    stored = re.findall(rf"st(?:matrix|\.shared)\S*\s+\[%r\d+\+?(\d*)\], {{?(?:{values})\b", ptx)
    read = re.findall(r"ld\.shared\.b32 \S+, \[global_smem\+(\d+)\]; setp\.ne\.b32 other", ptx)
    return [int(offset or 0) for offset in (*stored, *read)]


def _key_loops(cubin: bytes, groups: tuple[int, ...], stores: bool = False) -> list[int]:
    """Return the number of accesses to local memory in each loop over keys.

    Args:
        cubin: the compiled kernel.
        groups: WGMMA groups that end in such a loop: one more than the parts of a key, another one
            with the slope of a score function, or four if masked and unmasked tiles are branches
            of one loop (12 over 4-bit integers, 6 over such values only). Loops with stores to
            global memory are loops over query tiles.
        stores: loops over keys store to global memory, too; those over query tiles have more
            groups.
    """
    text = disassemble(cubin)
    lines = text.splitlines()
    labels = {
        match[1]: index
        for index, line in enumerate(lines)
        if (match := re.match(r"(\.L_x_\d+):", line.strip()))
    }
    accesses = []
    for index, line in enumerate(lines):
        jump = re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", line)
        if jump is None or labels[jump[1]] > index:
            continue
        body = lines[labels[jump[1]] : index]
        if (
            not any("USETMAXREG" in instruction for instruction in body)
            and (stores or not any("STG" in instruction for instruction in body))
            and sum("GMMA" in instruction and "gsb0" in instruction for instruction in body)
            in groups
        ):
            accesses.append(
                sum(bool(re.search(r"\b(LDL|STL)\b", instruction)) for instruction in body)
            )
    return accesses


def main(names: list[str]) -> None:
    collect_rarely()
    for name in names or list(CASES):
        try:
            result = compile_case(name)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        print(json.dumps({"case": name, "triton": triton.__version__, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
