"""Prefill over the paged cache: whole prompts, chunks over a long context, and batches that mix both with decodes.

`launch_prefill` also launches the same kernel over packed keys and values for `varlen_prefill`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.tiles import choose_prefill_tile, next_power_of_2
from attnlib.ops.triton.hopper.loader import hopper_choice
from attnlib.ops.triton.kernels.prefill import prefill_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered
from attnlib.ops.triton.launch.signature import (
    Options,
    Signature,
    attention_constants,
    attention_numbers,
    attention_tensors,
    launch_key,
    refuse_batch_invariant,
    signature_of,
)

__all__ = ["launch_prefill", "paged_prefill"]

_MOST_ROWS = 128
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
    counters: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Write the attention of every query token to `out`, and its log-sum-exp to `lse` (M1 to M9).

    Query token i of request r has position p = seq_len - query_len + i. It sees the keys k in
    [0, seq_len) with k <= p (causal), p - left <= k <= p + right (window) and
    k // chunk == p // chunk (attention chunks).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key_cache: `[B, N, Hkv, D]`, any strides but the last (P1); float8 holds key / k_scale.
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        block_table: `[R, M]` int32; entries at or past ceil(seq_len / N) are never read (P3).
        query_start_loc: `[R + 1]` int32, the first query token of each request.
        seq_lens: `[R]` int32, context and this step's tokens.
        params: how scores are computed, masked and scaled.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        out: `[T, Hq, Dv]`, last stride 1; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given: natural logarithm of the softmax denominator,
            sink included (M5); rows at or past `query_start_loc[-1]` become -inf.
        query_start_loc_cpu: ignored; see `attnlib.ops.torch.paged_prefill`.
        seq_lens_cpu: ignored; likewise.
        batch_invariant: must be False; `attnlib.ops.torch` has batch-invariant operations.
        counters: int32 zeros. The CTAs of the Hopper prefill distribute work with the first two and
            reset them to zero; allocated when None or fewer than two. Calls that may run
            concurrently need separate counters.
        kernels: "auto" uses the Hopper prefill where it supports the call, "portable" never.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device, or `batch_invariant`.
    """
    refuse_batch_invariant(batch_invariant)
    options = Options.from_params(params, out, lse)
    launch_prefill(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, max_query_len=max_query_len,
        options=options, max_seq_len=max_seq_len, kernels=kernels, counters=counters,
    )  # fmt: skip


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
        BoundLaunch(prefill_kernel, (num_tiles, num_kv_heads * constants["HEAD_BLOCKS"], 1), constants),
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
