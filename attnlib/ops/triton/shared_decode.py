"""Decode of requests that share prefixes, by one Hopper kernel and one that merges its results."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.signature import call_signature

__all__ = ["shared_decode"]


def shared_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    items: DecodeItems,
    params: AttentionParams,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> bool:
    """Attention of one query token per request, whose keys `items` lists.

    Args:
        query: `[T, Hq, D]`.
        key_cache: `[B, N, Hkv, D]`, strided (P1).
        value_cache: `[B, N, Hkv, Dv]`, strided.
        block_table: `[R, M]` int32, last stride 1.
        items: of the batch; at most T tokens.
        params: scale, soft cap and sinks count.
        out: `[T, Hq, Dv]`, written; rows without a request become 0 (M6).
        lse: `[T, Hq]` float32, written when given (M5).
        workspace: float32, `items.num_partials * Hq * (Dv + 1)` elements; allocated when None.

    Returns:
        False, without a launch, where the kernel cannot read these tensors.
    """
    limits = limits_of(query)
    key = (
        "shared decode", call_signature(query, key_cache, value_cache, out, lse, params),
        block_table.dtype, block_table.stride(), items.num_ranges, items.tile_keys,
    )  # fmt: skip
    prepared = LAUNCHES.get(key)
    if prepared is None or (prepared and prepared.limits is not limits):
        dispatch = hopper.load()
        given = query, key_cache, value_cache, block_table, out, lse, params, limits
        prepared = dispatch is not None and dispatch.select_shared_decode(
            dispatch.SharedDecodeCall(*given), items
        )
        LAUNCHES.keep(key, prepared)
    if not prepared:
        return False
    if workspace is None:
        workspace = prepared.workspace(items, query.device)
    served: bool = prepared.run(
        query, key_cache, value_cache, block_table, items, params, out, lse, workspace
    )
    return served
