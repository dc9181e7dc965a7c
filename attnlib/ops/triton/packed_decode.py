"""Decode over the packed cache of vLLM's PagedAttention: kernel, tile and splits of a call.

On Hopper, the Gluon decode kernel of the P-rules' layout also reads packed caches
(`hopper.kernels.cache_tiles`). The portable kernel (`kernels.packed`) serves everything else.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.packed_cache import check_packed_cache
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import (
    DeviceLimits,
    device_guard,
    limits_of,
    programmatic_launch,
)
from attnlib.ops.triton.heuristics.packed_tiles import packed_shared_bytes
from attnlib.ops.triton.heuristics.splits import (
    MAX_CTAS_PER_SM,
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    choose_num_splits,
)
from attnlib.ops.triton.heuristics.tile_table import relevant_work_class
from attnlib.ops.triton.heuristics.tiles import Tile, next_power_of_2
from attnlib.ops.triton.kernels.packed import packed_decode_kernel
from attnlib.ops.triton.kernels.packed_write import clear_counters_kernel
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.packed import PackedCall, joined_addresses
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention

__all__ = ["cleared_counters", "packed_decode"]


def packed_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_seq_len: int,
    out: Tensor,
    pattern: BlockSparsePattern | None = None,
    kernels: str = "auto",
) -> None:
    """Attention of one query token per request over the packed cache.

    On Hopper, the Gluon decode kernel serves 16-bit caches with int32 block tables and lengths,
    without ALiBi slopes and pattern (`hopper.dispatch.select_packed_decode`).

    Args:
        query: `[R, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key_cache: `[B, Hkv, D / x, N, x]`, N a power of two; float8 holds key / k_scale.
        value_cache: `[B, Hkv, D, N]`, likewise.
        block_table: `[R, M]` int32 or int64; entries at or past ceil(seq_len / N) are not read.
        seq_lens: `[R]` int32 or int64, keys of each request, the query's own included.
        params: scale, ALiBi slopes and KV scales; other features are not supported.
        max_seq_len: upper bound of the sequence lengths.
        out: `[R, Hq, D]`, written.
        pattern: the keys that each head sees; None for all.
        kernels: "auto" uses the Hopper decode where it supports the call, "portable" never.

    Raises:
        ContractError: shapes, strides or dtypes that the kernel cannot address.
    """
    check_packed_cache(query, key_cache, value_cache, block_table, seq_lens)
    if query.numel() == 0:
        return
    tensors = (query, key_cache, value_cache, out, block_table, seq_lens)
    call = PackedCall(*tensors, params, limits_of(query))
    if call.limits.capability[0] == 9 and pattern is None and kernels != "portable":
        hopper_decode = _hopper_decode(call, max_seq_len)
        if hopper_decode is not None and not joined_addresses(*tensors[:4]) & ALIGNMENT:
            batch = BatchTensors(seq_lens, seq_lens, block_table, max_query_len=1)
            if len(hopper_decode.kernels) == 1:  # it combines splits itself
                batch = batch._replace(counters=cleared_counters(query, call.limits))
            like = AttentionCall(*tensors[:4], None, batch, params, call.limits, ())
            run_attention(hopper_decode, like)
            return
    with device_guard(query):
        _prepare_portable(call, max_seq_len, pattern).run(call, pattern)


class _PortableDecode:
    """The launches of the portable kernel for one call signature.

    Args:
        limits: the chip.
        attend: the attention kernel.
        partials: how requests are split.
        waves: programs of a request and split, in programs that the chip runs at a time.
    """

    def __init__(
        self, limits: DeviceLimits, attend: BoundLaunch, partials: Partials, waves: float
    ) -> None:
        self.limits = limits
        self._attend = attend
        self._partials = partials
        self._waves = waves

    def run(self, call: PackedCall, pattern: BlockSparsePattern | None) -> None:
        """Launch on the current stream of the current device."""
        query, out, params = call.query, call.out, call.params
        space = self._partials.allocate(query)
        keys, values = call.caches()
        arguments = (
            *(query, keys, values, out, space, call.seq_lens, call.block_table),
            *(params.alibi_slopes, *call.scales(), float(params.scale)),
            *(*query.shape[:2], *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2]),
            *(*out.stride()[:2], call.block_table.stride(0)),
            *(self._partials.num_splits, self._waves, *_pattern_numbers(pattern)),
        )
        addresses = joined_addresses(query, keys, values, out, space)
        self._attend.run(arguments, addresses, query.get_device())
        self._partials.run(space, None, out, None)


def _prepare_portable(
    call: PackedCall, max_seq_len: int, pattern: BlockSparsePattern | None
) -> _PortableDecode:
    """The portable launches of a call. Cached.

    Raises:
        ContractError: too many requests for one grid.
    """
    num_reqs, num_heads, head_size = call.query.shape
    tile = call.tile(call.group)
    tile_heads = min(call.group, tile.block_m)
    head_blocks = triton.cdiv(call.group, tile_heads)
    ctas, resident = call.num_kv_heads * head_blocks, _resident(call, tile)
    num_splits = choose_num_splits(num_reqs, ctas, max_seq_len, tile.block_n, resident)
    key = ("packed decode", call.signature, num_splits, pattern)
    found: _PortableDecode | None = LAUNCHES.get(key)
    if found is not None and found.limits is call.limits:
        return found
    call.check_requests()
    overlap = programmatic_launch(call.limits)
    constants = {
        **call.constants(),
        **overlap,
        "SPLIT": num_splits > 1,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": 1,
        "HEAD_BLOCKS": head_blocks,
        "SPARSE": pattern is not None,
        "STRIPES_PER_QUERY_HEAD": pattern is None or pattern.head_sliding_step >= 0,
        **tile.constants,
    }
    grid = (ctas, num_splits, num_reqs)
    attend = BoundLaunch(packed_decode_kernel, grid, with_config(constants))
    partials = Partials.of_splits(num_splits, num_reqs, num_heads, head_size, overlap=overlap)
    prepared = _PortableDecode(call.limits, attend, partials, ctas / resident)
    kept: _PortableDecode = LAUNCHES.keep(key, prepared)
    return kept


def _resident(call: PackedCall, tile: Tile) -> int:
    """Programs that the chip runs at a time."""
    sizes = (call.query.shape[2], call.query.element_size(), call.key.element_size())
    need = packed_shared_bytes(replace(tile, num_stages=max(1, tile.num_stages - 1)), *sizes)
    most = MAX_CTAS_PER_SM * max(1, 4 // tile.num_warps)
    limits = call.limits
    return max(1, min(most, limits.shared_memory_per_sm // need)) * limits.num_sms


def _hopper_decode(call: PackedCall, max_seq_len: int) -> PreparedAttention | None:
    """The Hopper decode for calls of this signature; None where the portable kernel serves them."""
    limits, seq_lens = call.limits, call.seq_lens
    work = relevant_work_class(
        "hopper_decode",
        *(seq_lens.shape[0], call.num_kv_heads, max_seq_len, limits.num_sms, limits.tuned),
    )
    key = ("packed hopper decode", call.signature, work, float(call.params.scale))
    found: tuple[DeviceLimits, PreparedAttention | None] | None = LAUNCHES.get(key)
    if found is None or found[0] is not limits:
        prepared = None
        if (dispatch := hopper.load()) is not None:
            batch = BatchTensors(seq_lens, seq_lens, call.block_table, max_query_len=1)
            tensors = (call.query, call.key, call.value, call.out)
            like = AttentionCall(*tensors, None, batch, call.params, limits, key)
            prepared = dispatch.select_packed_decode(like, work)
        found = LAUNCHES.keep(key, (limits, prepared))
    return found[1]


def cleared_counters(query: Tensor, limits: DeviceLimits) -> Tensor:
    """Counters with which the Hopper decode combines splits in its own kernel.

    The interface has no buffers that outlive a call, so each call clears new ones. That is shorter
    than a kernel that combines, which has a program for every request.
    """
    number, index = hopper.load().num_counters(limits), query.get_device()
    counters = torch.empty(number, dtype=torch.int32, device=query.device)
    key = ("clear counters", number, index)
    launch: BoundLaunch | None = LAUNCHES.get(key)
    if launch is None:
        constants = {
            "SIZE": next_power_of_2(number),
            "num_warps": 4,
            **programmatic_launch(limits),
        }
        launch = LAUNCHES.keep(key, BoundLaunch(clear_counters_kernel, (1, 1, 1), constants))
    with device_guard(query):
        launch.run((counters, number), counters.data_ptr(), index)
    return counters


def _pattern_numbers(pattern: BlockSparsePattern | None) -> tuple[int, int, int, int, int]:
    """Local blocks, stride, block size, step and the first head of this rank."""
    if pattern is None:
        return (0, 1, 1, 0, 0)
    per_query_head = pattern.head_sliding_step >= 0
    heads = pattern.num_heads if per_query_head else pattern.num_kv_heads
    return (
        pattern.local_blocks,
        pattern.vert_stride,
        pattern.block_size,
        abs(pattern.head_sliding_step),
        pattern.tp_rank * heads,
    )
