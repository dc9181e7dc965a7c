"""Prefill over the paged cache: whole prompts, chunks over a long context, and batches of both.

On Hopper, a Gluon kernel (`hopper/`) serves the calls that it supports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.layer_tiles import prefill_tile
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.prefill import prefill_kernel
from attnlib.ops.triton.key_splits import key_splits
from attnlib.ops.triton.launch.attention import PlainAttention
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import page_strides
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.run import (
    KernelFamily,
    PreparedAttention,
    find_launches,
    run_kernels,
)
from attnlib.ops.triton.launch.score import has_head_bounds, range_constants
from attnlib.ops.triton.quantized_pages import element_constants

__all__ = ["PlainPrefill", "Prefill", "paged_prefill"]

_MAX_ROWS = 128
"""Rows of the largest tile."""


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
    kernels: str = "auto",
    counters: Tensor | None = None,
) -> None:
    """Attention of ragged query spans over the paged cache.

    Query i of request r is at position p = seq_len - query_len + i and sees the keys k in
    [0, seq_len) with k <= p (causal), p - left <= k <= p + right (window) and
    k // chunk == p // chunk (chunk).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key_cache: `[B, N, Hkv, D]`, any strides but the last (P1); float8 holds key / k_scale.
        value_cache: `[B, N, Hkv, Dv]`, stored in the same way.
        block_table: `[R, M]` int32; entries at or past ceil(seq_len / N) are never read (P3).
        query_start_loc: `[R + 1]` int32, where each request's tokens start.
        seq_lens: `[R]` int32, context and this step's tokens.
        params: scale, mask, biases, sinks and KV scales.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given: natural log of the softmax denominator (M5).
        query_start_loc_cpu, seq_lens_cpu: ignored; see `attnlib.ops.torch.paged_prefill`.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).
        kernels: "auto" uses the Hopper prefill where it supports the call, "portable" never.
        counters: int32 zeros. The Hopper prefill distributes work by the first two and leaves
            zeros; allocated when None or fewer. Concurrent calls need counters of their own.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    if query.numel() == 0:
        return
    batch = BatchTensors.of(
        params,
        query_start_loc,
        seq_lens,
        block_table,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        counters=counters,
    )
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    run_kernels(call, *_families(batch_invariant, kernels))


def _families(batch_invariant: bool, kernels: str) -> tuple[KernelFamily, ...]:
    """The kernels that may serve a call, the preferred ones first."""
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import InvariantKernels

        return (InvariantKernels(kernels),)
    return Prefill(kernels), PlainPrefill(divides_keys=True)


class Prefill(NamedTuple):
    """The Hopper prefill where it supports the call, else the plain kernel. Over pages.

    Attributes:
        kernels: "auto", "hopper" or "portable"; see `paged_prefill`.
        divides_keys: several programs may share the keys of a query tile. A prefill of several
            kernels cannot run concurrently with the decodes of its step.
    """

    kernels: str
    divides_keys: bool = True

    def launch_key(self, call: AttentionCall) -> tuple[Any, ...]:
        """See `KernelFamily`."""
        batch = call.batch
        return ("prefill", batch.max_query_len, batch.length_class(call.key), *self)

    def prepare_launches(self, call: AttentionCall) -> PreparedAttention:
        """See `KernelFamily`."""
        wanted = call.limits.capability[0] == 9 and self.kernels != "portable"
        prepared: PreparedAttention | None = None
        if wanted and (dispatch := hopper.load()) is not None:
            in_pages = call.params.scales_in_page
            if in_pages:
                prepared = dispatch.select_page_prefill(call)
            else:
                prepared = dispatch.select_prefill(call, self.divides_keys)
        plain = PlainPrefill(self.divides_keys)
        return find_launches(plain, call) if prepared is None else prepared


class PlainPrefill(NamedTuple):
    """The plain kernel, which also reads unaligned tensors. Over pages or packed keys.

    Attributes:
        divides_keys: see `Prefill`; over pages only.
    """

    divides_keys: bool = False

    def launch_key(self, call: AttentionCall) -> tuple[Any, ...]:
        """See `KernelFamily`. Row counts that choose the same tile share a launch."""
        rows = _tile_rows(call, has_head_bounds(call.params))
        bounds: tuple[int, ...] = ()
        if self.divides_keys:
            bounds = (call.batch.max_query_len, call.batch.length_class(call.key))
        return ("plain prefill", rows, call.is_paged, bounds)

    def prepare_launches(self, call: AttentionCall) -> PreparedAttention:
        """See `KernelFamily`."""
        one_head = has_head_bounds(call.params)
        return _plain_launch(call, _tile_rows(call, one_head), one_head, self.divides_keys)


def _tile_rows(call: AttentionCall, one_head: bool) -> int:
    """Query rows of a tile, at most; with `one_head`, of one query head."""
    heads = 1 if one_head else call.query.shape[1] // max(1, call.key.shape[-2])
    return min(_MAX_ROWS, next_power_of_2(heads * call.max_query_len))


def _plain_launch(
    call: AttentionCall, rows: int, one_head: bool, divides_keys: bool
) -> PlainAttention:
    """The launch of the plain kernel, and of the one that combines its splits.

    Args:
        call: over pages, or over packed keys.
        rows: query rows of a tile, at most.
        one_head: a tile has the rows of one query head.
        divides_keys: programs may share the keys of a query tile.
    """
    shape, params = call.shape, call.params
    has_score = params.score_function is not None
    tile = prefill_tile(shape, call.limits, rows, params.count_lookups(), has_score)
    constants = element_constants(call, tile)
    tile_heads = 1 if one_head else min(shape.group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(shape.group, tile_heads)
    blocks = shape.num_kv_heads * head_blocks
    num_splits = key_splits(call, tile_tokens, blocks) if divides_keys else 1
    constants |= {
        "SPLIT": num_splits > 1,
        **range_constants(params, "triton", one_head),
        "PAGED": call.is_paged,
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": head_blocks,
        **tile.constants,
    }
    num_tiles = call.num_tokens // tile_tokens + call.batch.query_start_loc.shape[0]
    partials = Partials.of_splits(
        num_splits,
        *(call.num_tokens, shape.num_heads, shape.head_size_v),
        has_sink=params.sink_kind,
        has_lse=call.lse is not None,
    )
    sizes = (num_splits, shape.num_heads) if num_splits > 1 else (None, None)
    return PlainAttention(
        call,
        BoundLaunch(prefill_kernel, (num_tiles, blocks, num_splits), with_config(constants)),
        (*sizes, num_tiles, *page_strides(call)),
        partials,
    )
