"""The launches of one signature of `selected_attention`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.layer_tiles import decode_tile, prefill_tile
from attnlib.ops.triton.heuristics.splits import MAX_CTAS_PER_SM, choose_uniform_splits
from attnlib.ops.triton.heuristics.tiles import Tile, key_chunks, next_power_of_2, shared_bytes
from attnlib.ops.triton.hopper.selected_plan import HopperSelectedLatents, selected_latents_reasons
from attnlib.ops.triton.kernels.selected import selected_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import attention_constants, reads_bytes
from attnlib.ops.triton.launch.partials import Partials
from attnlib.sparse.key_selection import KeySelection, SelectedKeys, SelectionScope

__all__ = ["SelectedLaunch", "clear_rows", "count_listed", "prepare_selected"]

_MAX_ROWS = 128
"""Rows of the largest tile."""
_MAX_LANES = 1024
"""Entries of a list that a program examines at the same time."""
_LIST_HEADS = {
    SelectionScope.ALL_HEADS: 0,
    SelectionScope.KV_HEAD: 1,
    SelectionScope.QUERY_HEAD: 2,
}


def count_listed(query: Tensor, selected: SelectedKeys | None) -> int:
    """Rows that have a list each. Padding behind the last request needs none (M7), and the Hopper
    kernels look lists up before they know where it begins."""
    if selected is None or selected.list_start_loc is not None:
        return query.shape[0]
    return min(query.shape[0], selected.indices.shape[0])


def clear_rows(first: int, out: Tensor, lse: Tensor | None) -> None:
    """Make rows from `first` on those of padding (M6)."""
    if first < out.shape[0]:
        out[first:].zero_()
        if lse is not None:
            lse[first:].fill_(-torch.inf)


class SelectedLaunch:
    """The launches of one call signature.

    Args:
        call: a call of this signature, of which no tensor is kept.
        attend: the attention kernel.
        num_tiles: query tiles of its grid.
        partials: how its lists are divided.
    """

    def __init__(
        self,
        call: AttentionCall,
        attend: BoundLaunch | HopperSelectedLatents,
        num_tiles: int,
        partials: Partials,
    ) -> None:
        self.limits = call.limits
        self._attend = attend
        self._num_tiles = num_tiles
        self._partials = partials
        self._as_bytes = reads_bytes(call.shape.cache_dtype, call.limits)

    def run(self, call: AttentionCall, selected: SelectedKeys) -> None:
        """Launch on the current stream of the current device."""
        space = self._partials.allocate(call.query)
        if isinstance(self._attend, HopperSelectedLatents):
            self._attend.run(call, space, selected.indices)
        else:
            arguments, addresses = self._arguments(call, selected, space)
            self._attend.run(arguments, addresses, call.query.get_device())
        self._partials.run(space, call.params.sinks, call.out, call.lse)

    def _arguments(
        self, call: AttentionCall, selected: SelectedKeys, space: Tensor | None
    ) -> tuple[tuple[object, ...], int]:
        """The runtime arguments of the portable kernel, and the addresses that it is specialized
        on, joined by `|`."""
        batch, params, indices = call.batch, call.params, selected.indices
        keys, values, flags = call.key, call.value, batch.causal_flags
        if self._as_bytes:
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        if flags is not None and flags.dtype != torch.uint8:
            flags = flags.view(torch.uint8)
        scales = (
            x if isinstance(x, Tensor) else float(x) for x in (params.k_scale, params.v_scale)
        )
        arguments = (
            *(call.query, keys, values, call.out, space),
            *(batch.query_start_loc, batch.seq_lens, batch.block_table),
            *(indices, selected.list_start_loc, flags, params.alibi_slopes, params.sinks),
            *(*scales, call.lse, float(params.scale), float(params.logits_soft_cap)),
            *(int(n) for n in (*params.window, params.attention_chunk_size)),
            *(call.num_reqs, call.num_tokens, call.shape.num_heads, indices.shape[2]),
            *(self._num_tiles, self._partials.num_splits, *indices.stride()[:2]),
            *(call.table_stride, *call.query.stride()[:2]),
            *(*keys.stride()[:3], *values.stride()[:3], *call.out.stride()[:2], call.lse_stride),
        )
        return arguments, call.addresses | (0 if space is None else space.data_ptr())


def prepare_selected(
    call: AttentionCall, selection: KeySelection, selected: SelectedKeys, kernels: str
) -> SelectedLaunch:
    """The launches of a call. Cached by everything that they depend on.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    num_entries = selected.indices.shape[2]
    key = ("selected", call.signature, call.batch.form(), selection, num_entries, kernels)
    found: SelectedLaunch | None = LAUNCHES.get(key)
    if found is not None and found.limits is call.limits:
        return found
    call.batch.check()
    if kernels != "portable" and not selected_latents_reasons(call, selection):
        prepared = _hopper_launch(call, selection, num_entries)
    else:
        prepared = _portable_launch(call, selection, num_entries)
    kept: SelectedLaunch = LAUNCHES.keep(key, prepared)
    return kept


def _portable_launch(
    call: AttentionCall, selection: KeySelection, num_entries: int
) -> SelectedLaunch:
    """The launches of the portable kernel."""
    shape, limits, scope = call.shape, call.limits, _LIST_HEADS[selection.scope]
    rows_of_token = 1 if scope == 2 else shape.group
    most_tokens = min(_MAX_ROWS, selection.query_block_size & -selection.query_block_size)
    tile = _choose_tile(shape, rows_of_token * most_tokens, limits)
    tile_heads = min(rows_of_token, tile.block_m)
    tile_tokens = min(most_tokens, _power_of_2_below(tile.block_m // tile_heads))
    programs = shape.num_kv_heads * triton.cdiv(shape.group, tile_heads)
    num_splits = choose_uniform_splits(
        triton.cdiv(call.num_tokens, tile_tokens) * programs,
        *(num_entries * selection.block_size, tile.block_n),
        _resident(shape, tile, limits),
    )
    shared = attention_constants(call)
    element = shape.query_dtype.itemsize
    constants = {
        **{name: value for name, value in shared.items() if name not in ("SCORE", "BOUNDS")},
        **key_chunks(shape.head_sizes, tile, element, limits.products, shape.latent),
        "SELECT": selection.block_size,
        "QUERY_BLOCK": selection.query_block_size,
        "LIST_HEADS": scope,
        "LIST_LANES": min(_MAX_LANES, next_power_of_2(selection.max_blocks)),
        "SPLIT": num_splits > 1,
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": triton.cdiv(shape.group, tile_heads),
        **tile.constants,
    }
    num_tiles = call.num_tokens // tile_tokens + call.batch.query_start_loc.shape[0]
    grid = (num_tiles, programs, num_splits)
    attend = BoundLaunch(selected_kernel, grid, with_config(constants))
    return SelectedLaunch(call, attend, num_tiles, _partials(call, num_splits))


def _hopper_launch(
    call: AttentionCall, selection: KeySelection, num_entries: int
) -> SelectedLaunch:
    """The launches of the Hopper kernel over selected latents."""
    attend = HopperSelectedLatents(call, selection, num_entries)
    return SelectedLaunch(call, attend, 0, _partials(call, attend.num_splits))


def _partials(call: AttentionCall, num_splits: int) -> Partials:
    return Partials.of_splits(
        num_splits,
        *(call.num_tokens, call.shape.num_heads, call.shape.head_size_v),
        has_sink=call.params.sinks is not None,
        has_lse=call.lse is not None,
    )


def _resident(shape: LayerShape, tile: Tile, limits: DeviceLimits) -> int:
    """Programs that the chip runs at a time."""
    need = shared_bytes(tile, *shape.head_sizes, *shape.element_bytes, limits.products)
    return max(1, min(MAX_CTAS_PER_SM, limits.shared_memory_per_sm // need)) * limits.num_sms


def _choose_tile(shape: LayerShape, rows: int, limits: DeviceLimits) -> Tile:
    """The tile for programs of this many rows: that of a decode for few rows."""
    rows = min(_MAX_ROWS, next_power_of_2(rows))
    return (decode_tile if rows <= 64 else prefill_tile)(shape, limits, rows)


def _power_of_2_below(n: int) -> int:
    """The largest power of two that is at most n; 1 for n < 1."""
    return 1 << max(0, n.bit_length() - 1)
