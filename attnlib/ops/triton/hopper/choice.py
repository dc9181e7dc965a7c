"""Whether a call of the Triton operations goes the Hopper way, and with which tile; the plain kernels serve the rest.

The public operations come here once they know that the chip is a Hopper. What follows from shapes and features is
worked out once for each kind of call; addresses are looked at every time, because TMA and 16-byte loads want aligned
ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from attnlib.ops.triton.arguments import Options
from attnlib.ops.triton.device import DeviceLimits
from attnlib.ops.triton.hopper.limits import decode_gaps, prefers_hopper_decode, prefill_gaps
from attnlib.ops.triton.hopper.paged_decode import hopper_decode_workspace_bytes, launch_hopper_decode
from attnlib.ops.triton.hopper.paged_prefill import launch_hopper_prefill
from attnlib.ops.triton.hopper.tiles import DecodeTile, HopperTile, choose_hopper_decode_tile, choose_hopper_tile
from attnlib.ops.triton.launch import Remembered

__all__ = ["decode_workspace_bytes", "stride_gaps", "try_decode", "try_prefill"]

_prefill_tiles: Remembered[HopperTile | None] = Remembered()
_decode_tiles: Remembered[DecodeTile | None] = Remembered()


def stride_gaps(**tensors: Tensor) -> list[str]:
    """Why tensors cannot be read in 16-byte pieces; empty when they can (given that they start on such a boundary)."""
    gaps = []
    for name, tensor in tensors.items():
        for dim, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
            if size > 1 and (stride % 8 or stride <= 0):
                gaps.append(f"{name} has stride {stride} in dimension {dim}; the Hopper kernels need a multiple of 8")
        if tensor.stride(-1) != 1:
            gaps.append(f"{name} has last stride {tensor.stride(-1)}; the Hopper kernels need 1")
    return gaps


def _aligned(*tensors: Tensor) -> bool:
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses & 15 == 0


def _features(options: Options) -> dict[str, bool]:
    scales = isinstance(options.k_scale, Tensor) or isinstance(options.v_scale, Tensor) or options.v_scale != 1.0
    return {
        "causal_per_request": isinstance(options.causal, Tensor),
        "alibi": options.alibi_slopes is not None,
        "bias": options.query_bias is not None,
        "scales": scales,
    }


def _layer(query: Tensor, key: Tensor, value: Tensor, limits: DeviceLimits) -> tuple[Any, ...]:
    sizes = (key.shape[3], value.shape[3])
    return limits.capability, query.dtype, key.dtype, sizes, key.shape[1], query.shape[1] // max(1, key.shape[2])


def _impossible(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    """What no gap of a layer can tell: strides, an empty pool, and a scale that would turn the maximum around."""
    tensors = stride_gaps(query=query, key_cache=key, value_cache=value, out=options.out)
    return bool(tensors) or key.shape[0] == 0 or value.dtype != key.dtype or options.out.dtype != query.dtype or options.scale <= 0


def _visible(options: Options) -> int | None:
    """Keys that one query sees at most, where a window or a chunk says so."""
    left, right = options.window[0], 0 if options.causal is True else options.window[1]
    bounds = [left + right + 1] if left >= 0 and right >= 0 else []
    return min([*bounds, *([options.attention_chunk_size] if options.attention_chunk_size > 0 else [])], default=None)


def try_prefill(
    same: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    options: Options,
    limits: DeviceLimits,
    max_query_len: int,
    max_seq_len: int,
    counters: Tensor | None,
) -> bool:
    """Serve the call if the Hopper prefill can; whether it did. `same` is the call's `launch_key`."""
    rows = query.shape[1] // max(1, key.shape[2]) * max_query_len
    known = (same, min(1 << 20, 1 << max(0, rows - 1).bit_length()), limits.tuned)
    tile = _prefill_tiles.get(known, known)
    if tile is known:
        fits = not prefill_gaps(*_layer(query, key, value, limits), **_features(options)) and not _impossible(query, key, value, options)
        tile = None
        if fits:
            shape = {"rows": known[1], "block_size": key.shape[1], "visible": _visible(options)}
            tile = choose_hopper_tile(key.shape[3], value.shape[3], **shape, tuned=limits.tuned)
        _prefill_tiles.keep(known, tile)
    if tile is None or not _aligned(query, key, value, options.out):
        return False
    assert isinstance(tile, HopperTile)  # the other kinds are handled above
    launch_hopper_prefill(
        query, key, value, block_table, starts, seq_lens, tile, max_seq_len=max_seq_len,
        scale=options.scale * float(options.k_scale), causal=bool(options.causal), window=options.window,
        attention_chunk_size=options.attention_chunk_size, logits_soft_cap=options.logits_soft_cap, sinks=options.sinks,
        out=options.out, lse=options.lse, counters=counters,
    )  # fmt: skip
    return True


def try_decode(
    same: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    options: Options,
    limits: DeviceLimits,
    max_query_len: int,
    visible: int,
    workspace: Tensor | None,
    insist: bool,
) -> bool:
    """Serve the call if the Hopper decode can and is the quicker one (or with `insist`, if it can); whether it did.

    `visible` is the most keys that a request's queries see. A workspace that is too small for this kernel, though large
    enough for the plain one, leaves the call to the plain one.
    """
    wanted = insist or prefers_hopper_decode(visible, seq_lens.shape[0], key.shape[2], limits.num_sms)
    known = (same, max_query_len, wanted, limits.tuned)
    tile = _decode_tiles.get(known, known)
    if tile is known:
        layer = (*_layer(query, key, value, limits), key.shape[2], limits.num_sms, max_query_len)
        fits = wanted and not decode_gaps(*layer, **_features(options)) and not _impossible(query, key, value, options)
        tile = choose_hopper_decode_tile(key.shape[3], value.shape[3], tuned=limits.tuned) if fits else None
        _decode_tiles.keep(known, tile)
    if tile is None or not _aligned(query, key, value, options.out):
        return False
    assert isinstance(tile, DecodeTile)  # the other kinds are handled above
    need = _workspace_bytes(query, key, value.shape[3], query.shape[0], max_query_len, limits, tile)
    if workspace is None:
        workspace = torch.empty(need // 4, dtype=torch.float32, device=query.device)
    elif workspace.numel() * workspace.element_size() < need:
        return False
    launch_hopper_decode(
        query, key, value, block_table, starts, seq_lens, tile, max_query_len=max_query_len,
        scale=options.scale * float(options.k_scale), causal=bool(options.causal), window=options.window,
        attention_chunk_size=options.attention_chunk_size, logits_soft_cap=options.logits_soft_cap, sinks=options.sinks,
        out=options.out, lse=options.lse,
        workspace=workspace if workspace.dtype == torch.float32 else workspace.view(torch.float32), same=same,
    )  # fmt: skip
    return True


def decode_workspace_bytes(query: Tensor, key: Tensor, head_size_v: int, num_tokens: int, max_query_len: int, limits: DeviceLimits) -> int:
    """Bytes that `try_decode` wants for such calls; 0 where the plain kernel serves them in any case.

    Args:
        query: any tensor `[*, Hq, D]` of the dtype that will be used.
        key: any cache `[*, N, Hkv, D]`, likewise.
        head_size_v: Dv.
        num_tokens: query tokens of the step.
        max_query_len: upper bound of the query lengths.
        limits: the chip.
    """
    sizes, group = (key.shape[3], head_size_v), query.shape[1] // max(1, key.shape[2])
    layer = (limits.capability, query.dtype, key.dtype, sizes, key.shape[1], group, key.shape[2], limits.num_sms, max_query_len)
    if decode_gaps(*layer):
        return 0
    tile = choose_hopper_decode_tile(key.shape[3], head_size_v, tuned=limits.tuned)
    return _workspace_bytes(query, key, head_size_v, num_tokens, max_query_len, limits, tile)


def _workspace_bytes(
    query: Tensor, key: Tensor, head_size_v: int, num_tokens: int, max_query_len: int, limits: DeviceLimits, tile: DecodeTile
) -> int:
    num_kv_heads = key.shape[2]
    return hopper_decode_workspace_bytes(
        num_tokens, num_kv_heads, query.shape[1] // num_kv_heads, max_query_len, head_size_v, limits.num_sms * tile.resident
    )
