"""The kernels of every kind of layer on described GPUs; nothing is compiled.

    python -m tests.described_kinds

The last line is a JSON object: GPU and kind of layer -> keys of its kernels. Under "noted" are
those that the noted steps of the warm-up need, under "all forms" those of calls with rows of a
fused tensor and with separate ones, and under "table" those of an open format.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from unittest import mock

import torch

from attnlib.ahead_of_time import DescribedLayer, DescribedServer
from attnlib.ahead_of_time.described import run_described
from attnlib.cache.layout import LAYOUTS
from attnlib.device import resolve_device
from attnlib.kv_formats import register_kv_format
from attnlib.layer import warmup, warmup_helpers
from attnlib.layer.warmup_steps import run_steps
from attnlib.ops.triton.launch import notes
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, AttentionType, MaskKind
from attnlib.workspace import BatchLimits
from tests.kv_formats.device_formats import CUBES

__all__ = ["KINDS", "LAYOUT_KINDS"]

LIMITS = BatchLimits(max_num_reqs=4, max_num_tokens=64, max_seq_len=512)
BASE: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_size": 128,
    "dtype": torch.bfloat16,
    "block_size": 16,
}
LATENTS: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 576,
    "head_size_v": 512,
    "use_mla": True,
    "block_size": 64,
}
LAYOUT_KINDS = {f"layout {name}": {"kv_cache_layout": name} for name in LAYOUTS}
KINDS: dict[str, dict[str, Any]] = {
    "alibi": {"has_alibi": True},
    "sink": {"has_sink": True, "sliding_window": 128, "head_size": 64},
    "chunks": {"attention_chunk_size": 64},
    "narrow keys": {"num_kv_heads": 1, "head_size": 8},  # their rows are not aligned
    "encoder": {"attn_type": AttentionType.ENCODER_ONLY},
    "cross-attention": {"attn_type": AttentionType.ENCODER_DECODER},
    "per request": {"mask_kind": MaskKind.PER_REQUEST},
    "tree": {"mask_kind": MaskKind.QUERY_BIAS},
    "selected keys": {"key_selection": KeySelection.parse("kv_head:128:16"), "block_size": 128},
    "entries": {"compressed_entries": CompressedEntries.parse("4:64:512"), "sliding_window": 128},
    "batch invariant": {"batch_invariant": True},
    "float32": {"dtype": torch.float32},
    "scales of heads": {"kv_cache_dtype": "fp8_e4m3", "kv_scale_kind": "head"},
    "int4": {"kv_cache_dtype": "int4_per_group"},
    "nvfp4": {"kv_cache_dtype": "nvfp4"},
    "blocks of one token": {"block_size": 1},
    "latents": LATENTS,
    "float8 latents": {"kv_cache_dtype": "fp8_e4m3", **LATENTS},
    "selected latents": {"key_selection": KeySelection(max_blocks=2048), **LATENTS},
    **LAYOUT_KINDS,
}


NOTED: dict[str, list[int]] = {}


def keys_of(server: DescribedServer, layer: DescribedLayer, writes_notes: bool = True) -> list[str]:
    """The keys of the kernels of a layer."""
    found: set[str] = set()
    run_described(server, [layer], lambda one, make: found.add(one.key), writes_notes=writes_notes)
    return sorted(found)


def run_noted(steps: Any, device: torch.device, facts: str) -> None:
    """In place of `run_steps`: the noted steps only."""
    run_steps([steps[number] for number in NOTED[facts]], device)


def main() -> None:
    """Print the keys."""
    logging.disable(logging.WARNING)
    notes.write_note = NOTED.__setitem__
    found: dict[str, dict[str, list[str]]] = {}
    for device, kinds in {"H100": [*KINDS], "sm_80": ["sink", "int4", "float8 latents"]}.items():
        server = DescribedServer(resolve_device(device), LIMITS)
        layers = {kind: DescribedLayer(AttentionSpec(**{**BASE, **KINDS[kind]})) for kind in kinds}
        found[device] = {kind: keys_of(server, layer) for kind, layer in layers.items()}
        if device == "H100":
            warmup.run_steps = run_noted
            found["noted"] = {kind: keys_of(server, layer, False) for kind, layer in layers.items()}
            warmup.run_steps = run_steps
            with mock.patch.object(warmup_helpers, "form_of", id):
                found["all forms"] = {k: keys_of(server, one, False) for k, one in layers.items()}
    # Its kernels have shared memory that Triton does not count, and for which they ask the driver.
    layer = DescribedLayer(AttentionSpec(**BASE, kv_cache_dtype=register_kv_format(CUBES).name))
    found["table"] = {"sm_80": keys_of(server, layer, False)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
