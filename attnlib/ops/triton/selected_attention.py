"""Attention over selected keys of the paged cache (M11): the launches of the Triton kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.layer_tiles import decode_tile, prefill_tile
from attnlib.ops.triton.heuristics.splits import (
    MAX_CTAS_PER_SM,
    choose_uniform_splits,
    paged_decode_workspace_bytes,
)
from attnlib.ops.triton.heuristics.tiles import Tile, key_chunks, next_power_of_2, shared_bytes
from attnlib.ops.triton.hopper.selected_plan import HopperSelectedLatents, selected_latents_reasons
from attnlib.ops.triton.kernels.decode import combine_kernel
from attnlib.ops.triton.kernels.selected import selected_kernel
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import attention_constants, reads_bytes
from attnlib.ops.triton.launch.scales import scale_signature
from attnlib.sparse.key_selection import KeySelection, SelectedKeys, SelectionScope

__all__ = ["selected_attention"]

_MAX_ROWS = 128
"""Rows of the largest tile."""
_MAX_LANES = 1024
"""Entries of a list that a program examines at the same time."""
_LIST_HEADS = {
    SelectionScope.ALL_HEADS: 0,
    SelectionScope.KV_HEAD: 1,
    SelectionScope.QUERY_HEAD: 2,
}


class _Launch:
    """The kernels of one call signature.

    Attributes:
        attend, combine: the kernels; `combine` is None where nothing is split.
        num_tiles, num_splits: sizes of the grid.
        partial_bytes: bytes of partial results; 0 where nothing is split.
        as_bytes: whether a float8 cache is read as bytes.
    """

    def __init__(
        self,
        limits: DeviceLimits,
        attend: BoundLaunch | HopperSelectedLatents,
        combine: BoundLaunch | None,
        num_tiles: int,
        num_splits: int,
        partial_bytes: int,
        as_bytes: bool,
    ) -> None:
        self.limits = limits
        self.attend = attend
        self.combine = combine
        self.num_tiles = num_tiles
        self.num_splits = num_splits
        self.partial_bytes = partial_bytes
        self.as_bytes = as_bytes


def selected_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    selection: KeySelection,
    selected: SelectedKeys,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Attention of every query token over its selected visible keys.

    Args:
        query, key_cache, value_cache, block_table: as in `paged_prefill`.
        query_start_loc, seq_lens, out, lse: likewise.
        query_start_loc_cpu, seq_lens_cpu: likewise.
        params: scale, mask, soft cap, ALiBi slopes, sinks and KV scales; a query bias and score
            functions are not supported.
        selection: the form of the lists.
        selected: the lists; checked by the caller (`SelectedKeys.check`). Only keys that they
            select are read, and only the block table entries of these.
        kernels: "auto" uses the Hopper kernel over selected latents where it supports the call and
            is faster, "hopper" wherever it supports it, "portable" never.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device, a query bias, or a
            score function.
    """
    if query.numel() == 0:
        return
    if params.query_bias is not None or params.score_function is not None:
        raise UnsupportedConfigError(
            "the Triton kernel over selected keys has no query bias and no score functions; use "
            "the torch backend",
            backend="triton",
        )
    indices, list_starts = selected.indices, selected.list_start_loc
    aligned = not _addresses(query, key_cache, out) & ALIGNMENT
    launch = _prepare(
        query, key_cache, value_cache, block_table, query_start_loc, params, selection, selected,
        out, lse, kernels if aligned else "portable",
    )  # fmt: skip
    partials = None
    if launch.partial_bytes:
        partials = torch.empty(launch.partial_bytes // 4, dtype=torch.float32, device=query.device)
    if isinstance(launch.attend, HopperSelectedLatents):
        with device_guard(query):
            launch.attend.run(
                query, key_cache, out, lse, partials, query_start_loc, seq_lens, block_table,
                indices, params,
            )  # fmt: skip
            _combine(launch, query, out, lse, partials, params)
        return
    keys, values = key_cache, value_cache
    if launch.as_bytes:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    flags = params.causal if isinstance(params.causal, Tensor) else None
    if flags is not None and flags.dtype != torch.uint8:
        flags = flags.view(torch.uint8)
    sinks, slopes = params.sinks, params.alibi_slopes
    left, right = params.window
    arguments = (
        query, keys, values, out, partials, query_start_loc, seq_lens, block_table, indices,
        list_starts, flags, slopes, sinks, *_scale_arguments(params), lse, float(params.scale),
        float(params.logits_soft_cap), int(left), int(right), int(params.attention_chunk_size),
        query_start_loc.shape[0] - 1, query.shape[0], query.shape[1], indices.shape[2],
        launch.num_tiles, launch.num_splits, indices.stride(0), indices.stride(1),
        block_table.stride(0), *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        *out.stride()[:2], 0 if lse is None else lse.stride(0),
    )  # fmt: skip
    with device_guard(query):
        index = query.get_device()
        launch.attend.run(arguments, _addresses(query, keys, values, out, partials), index)
        _combine(launch, query, out, lse, partials, params)


def _combine(
    launch: _Launch,
    query: Tensor,
    out: Tensor,
    lse: Tensor | None,
    partials: Tensor | None,
    params: AttentionParams,
) -> None:
    """Combine the partial results, if there are any."""
    if launch.combine is not None and partials is not None:
        launch.combine.run(
            (
                partials, params.sinks, out, lse, launch.num_splits, *query.shape[:2],
                *out.stride()[:2], 0 if lse is None else lse.stride(0),
            ),
            _addresses(partials, out),
            query.get_device(),
        )  # fmt: skip


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    selection: KeySelection,
    selected: SelectedKeys,
    out: Tensor,
    lse: Tensor | None,
    kernels: str,
) -> _Launch:
    """The launches of a call. Cached by everything that they depend on."""
    limits = limits_of(query)
    causal = "flags" if isinstance(params.causal, Tensor) else params.causal
    signature = (
        "selected attention", selection, values_are_prefix(key, value), selected.indices.shape[2],
        *(tensor_signature(tensor) for tensor in (query, key, value, out)),
        None if lse is None else tensor_signature(lse), tensor_signature(block_table),
        query_start_loc.shape, causal, params.window[0] >= 0, params.window[1] >= 0,
        params.attention_chunk_size > 0, params.logits_soft_cap > 0, params.scale > 0,
        None if params.alibi_slopes is None else tensor_signature(params.alibi_slopes),
        None if params.sinks is None else tensor_signature(params.sinks),
        scale_signature(params.k_scale), scale_signature(params.v_scale), float(params.scale),
        kernels,
    )  # fmt: skip
    found: _Launch | None = LAUNCHES.get(signature)
    if found is not None and found.limits is limits:
        return found
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ContractError(
            f"block_table has last stride {block_table.stride(1)}; it must be 1: call "
            ".contiguous()",
            rule="P3",
        )
    if kernels != "portable" and not selected_latents_reasons(
        query, key, value, out, params, selection, limits
    ):
        hopper = _prepare_hopper(query, key, value, params, selection, selected, lse, limits)
        kept_hopper: _Launch = LAUNCHES.keep(signature, hopper)
        return kept_hopper
    # No constant follows from the lengths.
    batch = BatchTensors(query_start_loc, query_start_loc[1:], block_table)
    call = AttentionCall(query, key, value, out, lse, batch, params, limits, signature)
    shared = attention_constants(call)
    constants = {name: x for name, x in shared.items() if name not in ("SCORE", "BOUNDS")}
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, head_size_v = value.shape[2:]
    group = num_heads // num_kv_heads
    list_heads = _LIST_HEADS[selection.scope]
    rows_of_token = 1 if list_heads == 2 else group
    most_tokens = min(_MAX_ROWS, selection.query_block_size & -selection.query_block_size)
    shape = call.shape
    tile = _choose_tile(shape, rows_of_token * most_tokens, limits)
    tile_heads = min(rows_of_token, tile.block_m)
    tile_tokens = min(most_tokens, _power_of_2_below(tile.block_m // tile_heads))
    head_blocks = triton.cdiv(group, tile_heads)
    element = query.element_size()
    num_tiles = num_tokens // tile_tokens + query_start_loc.shape[0]
    blocks_of_heads = num_kv_heads * head_blocks
    need = shared_bytes(tile, head_size, head_size_v, element, key.element_size(), limits.products)
    per_sm = max(1, min(MAX_CTAS_PER_SM, limits.shared_memory_per_sm // need))
    num_splits = choose_uniform_splits(
        triton.cdiv(num_tokens, tile_tokens) * blocks_of_heads,
        selected.indices.shape[2] * selection.block_size, tile.block_n, per_sm * limits.num_sms,
    )  # fmt: skip
    constants |= {
        **key_chunks((head_size, head_size_v), tile, element, limits.products, shape.latent),
        "SELECT": selection.block_size,
        "QUERY_BLOCK": selection.query_block_size,
        "LIST_HEADS": list_heads,
        "LIST_LANES": min(_MAX_LANES, next_power_of_2(selection.max_blocks)),
        "SPLIT": num_splits > 1,
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": head_blocks,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
    launch = _Launch(
        limits,
        BoundLaunch(
            selected_kernel, (num_tiles, blocks_of_heads, num_splits), with_config(constants)
        ),
        _bind_combine(query, head_size_v, num_splits, params, lse),
        num_tiles,
        num_splits,
        paged_decode_workspace_bytes(num_tokens, num_heads, head_size_v, num_splits),
        reads_bytes(key.dtype, limits),
    )
    kept: _Launch = LAUNCHES.keep(signature, launch)
    return kept


def _prepare_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    selection: KeySelection,
    selected: SelectedKeys,
    lse: Tensor | None,
    limits: DeviceLimits,
) -> _Launch:
    """The launches of a call that the Hopper kernel over selected latents serves."""
    num_tokens, num_heads = query.shape[:2]
    attend = HopperSelectedLatents(
        query, key, value, lse, params, selection, selected.indices.shape[2], limits
    )
    splits, head_size_v = attend.num_splits, value.shape[3]
    return _Launch(
        limits, attend, _bind_combine(query, head_size_v, splits, params, lse), 0, splits,
        paged_decode_workspace_bytes(num_tokens, num_heads, head_size_v, splits), False,
    )  # fmt: skip


def _bind_combine(
    query: Tensor, head_size_v: int, num_splits: int, params: AttentionParams, lse: Tensor | None
) -> BoundLaunch | None:
    """The kernel that combines the splits; None where nothing is split."""
    if num_splits <= 1:
        return None
    constants = {
        "HAS_SINK": params.sinks is not None,
        "HAS_LSE": lse is not None,
        "DV": head_size_v,
        "DV_PAD": next_power_of_2(head_size_v),
        "STEP": 16,
        "PDL": False,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return BoundLaunch(combine_kernel, (query.shape[0], query.shape[1], 1), constants)


def _choose_tile(shape: LayerShape, rows: int, limits: DeviceLimits) -> Tile:
    """The tile for programs of this many rows: that of a decode for few rows."""
    rows = min(_MAX_ROWS, next_power_of_2(rows))
    return (decode_tile if rows <= 64 else prefill_tile)(shape, limits, rows)


def _power_of_2_below(n: int) -> int:
    """The largest power of two that is at most n; 1 for n < 1."""
    return 1 << max(0, n.bit_length() - 1)


def _scale_arguments(params: AttentionParams) -> tuple[Tensor | float, ...]:
    return tuple(
        scale if isinstance(scale, Tensor) else float(scale)
        for scale in (params.k_scale, params.v_scale)
    )


def _addresses(*tensors: Tensor | None) -> int:
    """The addresses that the kernels are specialized on, joined by `|`."""
    joined = 0
    for tensor in tensors:
        joined |= 0 if tensor is None else tensor.data_ptr()
    return joined
