"""The prefill kernel, over a paged cache or packed keys and values; `paged_prefill` and `varlen_prefill` launch it.

One program per tile of query rows and group of heads. The grid comes from upper bounds (T // tokens per tile, one more
for each request, one for the rest); a program finds its request on the device. Tiles run from the last to the first, so
that under a causal mask the longest rows start first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.tiles import choose_prefill_tile, next_power_of_2
from attnlib.ops.triton.hopper.loader import hopper_choice
from attnlib.ops.triton.kernels.attend import aligned, attend, pack_rows, store_rows
from attnlib.ops.triton.kernels.quant import load_scale
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.softmax import LN2, finish_rows
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered
from attnlib.ops.triton.launch.signature import (
    UNALIGNED,
    UNSPECIALISED,
    Options,
    Signature,
    attention_constants,
    attention_numbers,
    attention_tensors,
    launch_key,
    signature_of,
)

__all__ = ["launch_prefill"]

_MOST_ROWS = 128
"""Rows of the largest tile."""


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def _prefill_kernel(query, key, value, out, lse, query_start_loc, seq_lens, causal_flags, alibi_slopes, sinks, bias,
                    k_scale, v_scale, scale, soft_cap, left, right, chunk, num_reqs, num_tokens, stride_qt, stride_qh,
                    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ot, stride_oh, stride_lt,
                    stride_bt, block_table, stride_table, num_tiles, PAGED: tl.constexpr, TILE_HEADS: tl.constexpr,
                    TILE_TOKENS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
                    D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
                    KV_KIND: tl.constexpr, COMPUTE: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr,
                    HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
                    HAS_SINK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr, K_SCALE_KIND: tl.constexpr,
                    V_SCALE_KIND: tl.constexpr, SCALE_LATE: tl.constexpr, VEC_Q: tl.constexpr, VEC_K: tl.constexpr,
                    VEC_V: tl.constexpr, VEC_O: tl.constexpr):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    head_offset = tl.program_id(1) % HEAD_BLOCKS * TILE_HEADS
    request = find_request(query_start_loc, tile, num_reqs, TILE_TOKENS, 128)
    start = tl.load(query_start_loc + request)
    first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS

    if request == num_reqs:
        # Rows after the last request (M6): zero, whatever lay there.
        token, head, valid = pack_rows(
            first_token, num_tokens - start, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
        )
        head = kv_head * GROUP + head
        token64 = (start + token).to(tl.int64)
        nothing = tl.zeros([BLOCK_M], tl.float32)
        offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
        store_rows(
            out, offsets, tl.zeros([BLOCK_M, DV0], tl.float32), nothing, valid, DV, 0, DV0, VEC_O
        )
        if DV1 > 0:
            store_rows(
                out,
                offsets,
                tl.zeros([BLOCK_M, DV1], tl.float32),
                nothing,
                valid,
                DV,
                DV0,
                DV1,
                VEC_O,
            )
        if HAS_LSE:
            tl.store(lse + token64 * stride_lt + head, nothing - float("inf"), mask=valid)
        return

    query_len = tl.load(query_start_loc + request + 1) - start
    if first_token >= query_len:
        return
    kv_head64 = kv_head.to(tl.int64)
    key += aligned(kv_head64 * stride_kh, VEC_K)
    value += aligned(kv_head64 * stride_vh, VEC_V)
    if PAGED:
        seq_len = tl.load(seq_lens + request)
        table = block_table + request.to(tl.int64) * stride_table
    else:
        # Without a cache `seq_lens` holds where each request's keys start.
        first_key = tl.load(seq_lens + request)
        seq_len = tl.load(seq_lens + request + 1) - first_key
        key += aligned(first_key.to(tl.int64) * stride_kn, VEC_K)
        value += aligned(first_key.to(tl.int64) * stride_vn, VEC_V)
        table = block_table
    causal = 0
    if CAUSAL == 2:
        causal = tl.load(causal_flags + request).to(tl.int32)

    token, head, valid = pack_rows(
        first_token, query_len, head_offset, GROUP, TILE_HEADS, TILE_TOKENS, BLOCK_M
    )
    head = kv_head * GROUP + head
    token64 = (start + token).to(tl.int64)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=valid, other=0.0)
    bias_rows = bias
    if HAS_BIAS:
        bias_rows = bias + tl.where(valid, token64, 0) * stride_bt
    last_token = tl.minimum(first_token + TILE_TOKENS, query_len) - 1
    query_offsets = token64 * stride_qt + head.to(tl.int64) * stride_qh
    acc0, acc1, peak, total = attend(
        query, query_offsets, valid, token, first_token, last_token, query_len, seq_len, causal, key, value, table,
        0, 0, stride_kb, stride_kn, stride_vb, stride_vn, scale * load_scale(k_scale, kv_head, K_SCALE_KIND),
        soft_cap, slopes, bias_rows, left, right, chunk, False, False, PAGED, BLOCK_M, BLOCK_N, BLOCK_SIZE, D, D0, D1,
        DV, DV0, DV1, KV_KIND, COMPUTE, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_ALIBI, HAS_BIAS,
        SCALE_LATE, VEC_Q, VEC_K, VEC_V)  # fmt: skip

    sink = 0.0
    if HAS_SINK:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
    factor, base2_lse = finish_rows(peak, total, sink, HAS_SINK)
    factor = factor * load_scale(v_scale, kv_head, V_SCALE_KIND)
    offsets = token64 * stride_ot + head.to(tl.int64) * stride_oh
    store_rows(out, offsets, acc0, factor, valid, DV, 0, DV0, VEC_O)
    if DV1 > 0:
        store_rows(out, offsets, acc1, factor, valid, DV, DV0, DV1, VEC_O)
    if HAS_LSE:
        tl.store(lse + token64 * stride_lt + head, base2_lse * LN2, mask=valid)


def launch_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    options: Options,
    max_seq_len: int = 0,
    kernels: str = "portable",
    counters: Tensor | None = None,
) -> None:
    """Run the prefill kernel, or Hopper's own one where it can serve the call.

    Args:
        query: `[T, Hq, D]`.
        key: `[B, N, Hkv, D]`, or `[Tk, Hkv, D]` when `block_table` is None.
        value: likewise, with Dv.
        block_table: `[R, M]` int32, or None for packed keys.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32; for packed keys `[R + 1]` int32, where each request's keys start.
        max_query_len: upper bound of the query lengths; chooses the tile and nothing else.
        options: the optional features.
        max_seq_len: upper bound of the sequence lengths; only the Hopper prefill looks at it.
        kernels: "portable" keeps to the plain kernel.
        counters: as in `paged_prefill`.
    """
    if query.numel() == 0:
        return
    limits = limits_of(query)
    same = (
        launch_key(query, key, value, query_start_loc, seq_lens, block_table, options),
        max_query_len,
        kernels,
    )
    found = _launches.get(same)
    if found is None or found.limits is not limits:
        found = _Launches(
            limits,
            _hopper_launch(
                query,
                key,
                value,
                block_table,
                query_start_loc,
                options,
                limits,
                max_query_len,
                kernels,
            ),
        )
        _launches.keep(same, found)
    if found.fast is not None and found.fast.serve(
        query, key, value, block_table, query_start_loc, seq_lens, options, max_seq_len, counters
    ):
        return
    launch = found.plain
    if launch is None:
        launch = found.plain = _prepare(
            query, key, value, block_table, query_start_loc, options, limits, max_query_len
        )
    tensors = attention_tensors(
        query, key, value, query_start_loc, seq_lens, options, launch.as_bytes
    )
    addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | options.out.data_ptr()
    with device_guard(query):
        launch.attend(
            (*tensors, *launch.numbers, block_table, *launch.last), addresses, launch.index
        )


@dataclass(frozen=True)
class _PrefillLaunch:
    """A call of `launch_prefill` less its addresses: what the layers of one step share.

    Attributes:
        index: the device's number.
        numbers, last: the runtime numbers before and after the block table.
        as_bytes: whether the kernel sees a float8 cache as bytes.
        attend: the kernel.
    """

    index: int
    numbers: tuple[float | int, ...]
    last: tuple[int, int]
    as_bytes: bool
    attend: BoundLaunch


@dataclass
class _Launches:
    """What serves calls of one kind.

    Attributes:
        limits: the chip that it was worked out for.
        fast: Hopper's own prefill (a `HopperPrefill`), which looks at addresses before it serves a call; None where it
            cannot serve any.
        plain: the portable kernel; None until it is needed.
    """

    limits: DeviceLimits
    fast: Any
    plain: _PrefillLaunch | None = None


_launches: Remembered[_Launches] = Remembered()


def _hopper_launch(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None, starts: Tensor, options: Options,
    limits: DeviceLimits, max_query_len: int, kernels: str,
) -> Any:  # fmt: skip
    if (
        limits.capability[0] != 9
        or kernels == "portable"
        or block_table is None
        or (fast := hopper_choice()) is None
    ):
        return None
    return fast.find_prefill(query, key, value, block_table, starts, options, limits, max_query_len)


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None, starts: Tensor, options: Options,
    limits: DeviceLimits, max_query_len: int,
) -> _PrefillLaunch:  # fmt: skip
    """Choose tile and grid."""
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = key.shape[-2]
    signature = signature_of(query, key, value, options, limits)
    constants = _constants(
        signature, _row_class(num_heads // num_kv_heads * max_query_len), block_table is not None
    )
    num_tiles = num_tokens // constants["TILE_TOKENS"] + starts.shape[0]
    return _PrefillLaunch(
        query.get_device(), attention_numbers(query, key, value, starts, options),
        (block_table.stride(0) if block_table is not None else 0, num_tiles), signature.fp8_as_bytes,
        BoundLaunch(_prefill_kernel, (num_tiles, num_kv_heads * constants["HEAD_BLOCKS"], 1), constants),
    )  # fmt: skip


def _row_class(rows: int) -> int:
    """Row counts that choose the same tile, as one number."""
    return min(_MOST_ROWS, next_power_of_2(rows))


@functools.lru_cache(maxsize=1024)
def _constants(signature: Signature, rows: int, paged: bool) -> dict[str, Any]:
    """Every named argument of the kernel."""
    shared = attention_constants(signature)
    group, limits = shared["GROUP"], signature.limits
    tile = choose_prefill_tile(
        shared["D"], shared["DV"], signature.query_dtype.itemsize, signature.cache_dtype.itemsize,
        rows, limits.shared_memory, limits.products, shared["HAS_BIAS"], native_fp8=limits.has_fp8,
        tuned=limits.tuned,
    )  # fmt: skip
    tile_heads = min(group, tile.block_m)
    return {
        **shared,
        "PAGED": paged,
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile.block_m // tile_heads,
        "HEAD_BLOCKS": triton.cdiv(group, tile_heads),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
