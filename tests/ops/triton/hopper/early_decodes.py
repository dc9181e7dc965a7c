"""Decodes between the kernels of an exchange: what they read early, and splits that they leave."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from attnlib.ops.split_states import SplitStates
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from tests.ops.triton.hopper.emulated_memory import EARLY_LOADS, LOCAL
from tests.ops.triton.hopper.emulated_tensors import Pointer

__all__ = ["EARLY", "combine_splits", "watched"]

_INT8: dict[str, Any] = {"keys": "int8_per_token_head", "tile": DecodeTile(64, 3, 2)}
EARLY: dict[str, dict[str, Any]] = {
    f"early, {name}": {
        "batch": "q1s300_q1s70_q1s500", "keys": "auto", "values": None, "tile": DecodeTile(64, 3),
        "early": ["partition 1", "partition 2"], **options,
    }
    for name, options in {
        "bfloat16": {},
        "bfloat16, combined": {"counters": True},
        "bfloat16, uncombined, 2 tokens": {"uncombined": True, "batch": "q2s300_q1s9_q2s500"},
        "bfloat16, uncombined, no keys": {
            "uncombined": True, "batch": "q1s0_q1s300_q1s0_q1s900_q1s0",
        },
        "int8, one warp, uncombined": {
            **_INT8, "tile": DecodeTile(64, 2, warps=2), "uncombined": True, "early": [],
        },
        "int8, two consumers": {
            **_INT8, "window": (99, 0), "logits_soft_cap": 20.0, "sinks": True,
            "early": ["partition 2", "partition 3"],
        },
    }.items()
}  # fmt: skip
"""Cases of `emulated_pages`. The kernel before writes the queries, which are NaN until the decode
waits for it. The partitions that `early` names do not wait."""


@contextmanager
def watched(query: torch.Tensor) -> Iterator[None]:
    """Inside, a partition that reads queries before it has waited is noted in `EARLY_LOADS`."""
    load, address = Pointer.load, query.untyped_storage().data_ptr()

    def noted(self: Pointer, mask: Any, other: Any) -> Any:
        if self.memory.data_ptr() == address and not LOCAL.waited:
            EARLY_LOADS.add(f"queries: {LOCAL.partition}")
        return load(self, mask, other)

    with mock.patch.object(Pointer, "load", noted):
        yield


def combine_splits(
    splits: SplitStates | None, out: torch.Tensor, lse: torch.Tensor, kv_heads: int
) -> None:
    """Write the states of several splits into `[T, Hq, Dv]` outputs and `[T, Hq]` LSEs, and those
    of rows past the batch."""
    if splits is None:
        return
    tokens, heads, size = out.shape
    group, end = heads // kv_heads, int(splits.starts[-1])
    outs, lses = splits.outs.view(-1, splits.rows, size), splits.lses.view(-1, splits.rows)
    for token in range(end):
        for kv_head in range(kv_heads):
            header = int(splits.headers[token * kv_heads + kv_head])
            count, row, first = header & 511, header >> 9 & 63, header >> 15
            if count < 2:
                continue
            later = [(first // 2 + split * kv_heads) * 2 for split in range(1, count)]
            places, rows = [first, *later], slice(row, row + group)
            logits, own = lses[places, rows] * math.log(2), slice(kv_head * group, None)
            weights = torch.where(logits == -torch.inf, 0.0, logits.softmax(0)).unsqueeze(-1)
            out[token, own][:group] = (outs[places, rows] * weights).sum(0).to(out.dtype)
            lse[token, own][:group] = logits.logsumexp(0)
    out[end:], lse[end:] = 0.0, -torch.inf
