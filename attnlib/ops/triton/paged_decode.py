"""Decode over the paged cache: few query tokens per request, so the time is that of reading keys and values once.

One program per (group of heads, split, request). A long request's keys are split over several programs, whose partial
results (float32, in the workspace) a second kernel joins; a request that needs one split is written directly. Flash
decoding is the origin of the split, FlashAttention's GQA packing that of the rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import (
    DeviceLimits,
    device_guard,
    limits_of,
    programmatic_launch,
)
from attnlib.ops.triton.heuristics.splits import (
    MAX_CTAS_PER_SM,
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    choose_num_splits,
    paged_decode_workspace_bytes,
    visible_bound,
)
from attnlib.ops.triton.heuristics.tile_table import relevant_work_class
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    choose_decode_tile,
    next_power_of_2,
    shared_bytes,
)
from attnlib.ops.triton.hopper.loader import hopper_choice
from attnlib.ops.triton.kernels.decode import combine_kernel, decode_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered
from attnlib.ops.triton.launch.signature import (
    Options,
    Signature,
    attention_constants,
    attention_numbers,
    attention_tensors,
    count_of,
    launch_key,
    refuse_batch_invariant,
    signature_of,
)

__all__ = ["find_decode", "paged_decode", "paged_decode_num_splits", "paged_decode_workspace_bytes"]

_COMBINE_STEP = 16
_MOST_REQUESTS = 65534
"""A grid's third dimension, less the programs for the rows after the last request."""


@dataclass(frozen=True)
class DecodePlan:
    """What a decode launch knows before it sees lengths.

    Attributes:
        tile: shape of one program.
        groups: programs per request and split.
        slots: programs that the chip runs at a time.
        packing: compile-time constants that say how rows are packed.
    """

    tile: Tile
    groups: int
    slots: int
    packing: dict[str, int]


@functools.lru_cache(maxsize=1024)
def _plan(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    cache_bytes: int,
    max_query_len: int,
    has_bias: bool,
    limits: DeviceLimits,
    keys_per_sm: int | None,
) -> DecodePlan:
    group = num_heads // num_kv_heads
    tile = choose_decode_tile(
        head_size, head_size_v, query_bytes, cache_bytes, group * max_query_len, limits.shared_memory, limits.products,
        has_bias, keys_per_sm=keys_per_sm, native_fp8=limits.has_fp8, tuned=limits.tuned,
    )  # fmt: skip
    tile_heads = min(group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(group, tile_heads)
    need = shared_bytes(
        tile, head_size, head_size_v, query_bytes, cache_bytes, limits.products, has_bias
    )
    resident = max(1, min(MAX_CTAS_PER_SM, limits.shared_memory_per_sm // need))
    groups = num_kv_heads * head_blocks * triton.cdiv(max_query_len, tile_tokens)
    packing = {"TILE_HEADS": tile_heads, "TILE_TOKENS": tile_tokens, "HEAD_BLOCKS": head_blocks}
    return DecodePlan(tile, groups, limits.num_sms * resident, packing)


@functools.lru_cache(maxsize=1024)
def _constants(
    signature: Signature, max_query_len: int, split: bool, balanced: bool, keys_per_sm: int | None
) -> tuple[DecodePlan, dict[str, Any]]:
    """The plan of a launch and every named argument of its kernel."""
    shared = attention_constants(signature)
    _, num_heads, head_size = signature.query_shape
    _, num_kv_heads, head_size_v = signature.value_shape
    plan = _plan(num_heads, num_kv_heads, head_size, head_size_v, signature.query_dtype.itemsize,
                 signature.cache_dtype.itemsize, max_query_len, shared["HAS_BIAS"], signature.limits,
                 keys_per_sm)  # fmt: skip
    return plan, {
        **shared,
        **plan.packing,
        **programmatic_launch(signature.limits),
        "SPLIT": split,
        "BALANCED": balanced,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        "BLOCK_M": plan.tile.block_m,
        "BLOCK_N": plan.tile.block_n,
        "num_warps": plan.tile.num_warps,
        "num_stages": plan.tile.num_stages,
        "enable_fp_fusion": True,
    }


def paged_decode_num_splits(
    query: Tensor,
    key_cache: Tensor,
    head_size_v: int,
    *,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
) -> int:
    """The bound on splits that `paged_decode` uses when it is given none: for sizing a workspace beforehand.

    Args:
        query: any tensor `[*, Hq, D]` of the dtype and on the device that will be used.
        key_cache: the cache view `[B, N, Hkv, D]`.
        head_size_v: Dv.
        num_reqs: requests of the batch.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        causal: False also stands for causality per request.
        window: (left, right), -1 unbounded.
        attention_chunk_size: 0 is none.
    """
    limits, num_kv_heads = limits_of(query), key_cache.shape[2]
    visible = visible_bound(max_query_len, max_seq_len, window, causal, attention_chunk_size)
    work = relevant_work_class(
        "decode", num_reqs, num_kv_heads, visible, limits.num_sms, limits.tuned
    )
    plan = _plan(query.shape[1], num_kv_heads, query.shape[2], head_size_v, query.element_size(),
                 key_cache.element_size(), max(1, max_query_len), False, limits, work)  # fmt: skip
    return choose_num_splits(num_reqs, plan.groups, visible, plan.tile.block_n, plan.slots)


def paged_decode(
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
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Compute what `paged_prefill` computes, for batches of short queries (typically 1 to 8 tokens).

    Args:
        num_splits: number of splits of each request's keys. None chooses it from the bounds and
            splits long requests more often. A number splits every request the same way, so that
            the bits of a row depend on its own request only.
        workspace: contiguous float32 or uint8 tensor of at least
            `paged_decode_workspace_bytes(...)` bytes; allocated when None and needed. The Hopper
            decode needs `hopper.dispatch.decode_workspace_bytes(...)` and is not used with less.
        counters: int32 zeros, `hopper.dispatch.num_counters(...)` of them. With them the CTAs of
            the Hopper decode combine the splits of a request themselves and reset the counters to
            zero; with fewer, a second kernel combines. Calls that may run concurrently need
            separate counters.
        kernels: "auto" uses the Hopper decode where it supports the call and is faster, "hopper"
            wherever it supports the call, "portable" never.

    The other arguments are those of `paged_prefill`.

    Raises:
        ContractError: a workspace that is too small, counters that are not int32, or tensors that
            the kernels cannot address.
        UnsupportedConfigError: as `paged_prefill` raises it.
    """
    refuse_batch_invariant(batch_invariant)
    if query.numel() == 0:
        return
    options = Options.from_params(params, out, lse)
    limits, num_counters = limits_of(query), count_of(counters)
    same = launch_key(
        query, key_cache, value_cache, query_start_loc, seq_lens, block_table, options
    )
    known = (same, max_query_len, max_seq_len, num_splits, num_counters, kernels)
    found = _launches.get(known)
    if found is None or found.limits is not limits:
        visible = visible_bound(
            max_query_len,
            max_seq_len,
            params.window,
            params.causal is True,
            params.attention_chunk_size,
        )
        found = _launches.keep(known, _Launches(limits, _hopper_launch(
            same, query, key_cache, value_cache, block_table, query_start_loc, options, limits, max_query_len, visible,
            num_splits, num_counters, kernels,
        )))  # fmt: skip
    batch = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens)
    if found.fast is not None and found.fast.serve(*batch, options, workspace, counters):
        return
    launch = found.plain
    if launch is None:
        launch = found.plain = _prepare(same, query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
                                        options, limits, max(1, max_query_len), max_seq_len, num_splits)  # fmt: skip
    partials = (
        _partials(workspace, launch.partial_floats, launch, query.device)
        if launch.combine is not None
        else None
    )
    with device_guard(query):
        _launch(
            launch,
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            options,
            partials,
        )


def find_decode(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, seq_lens: Tensor, options: Options, max_query_len: int,
    max_seq_len: int, counters: Tensor | None, kernels: str,
) -> _Launches | None:  # fmt: skip
    """What served an earlier `paged_decode` with such tensors, without a split count; None when there was none."""
    same = launch_key(query, key, value, starts, seq_lens, block_table, options)
    found = _launches.get((same, max_query_len, max_seq_len, None, count_of(counters), kernels))
    return found if found is not None and found.limits is limits_of(query) else None


@dataclass(frozen=True)
class _DecodeLaunch:
    """A call of `paged_decode` less its addresses: what the layers of one step share.

    Attributes:
        limits: the chip it was worked out for.
        index: its number.
        numbers, table_stride, last: the runtime numbers of the attention kernel, between its tensors.
        combine_numbers: those of the combining kernel.
        partial_floats: float32 elements of workspace.
        as_bytes: whether the kernel sees a float8 cache as bytes.
        attend: the attention kernel.
        combine: the kernel that joins splits; None when nothing is split.
    """

    limits: DeviceLimits
    index: int
    numbers: tuple[float | int, ...]
    table_stride: int
    last: tuple[float | int, ...]
    combine_numbers: tuple[int, ...]
    partial_floats: int
    as_bytes: bool
    attend: BoundLaunch
    combine: BoundLaunch | None


@dataclass
class _Launches:
    """What serves calls of one kind.

    Attributes:
        limits: the chip that it was worked out for.
        fast: Hopper's own decode (a `HopperDecode`), which looks at addresses and workspace before it serves a call; None
            where it cannot serve any, or is the slower one.
        plain: the portable kernels; None until they are needed.
    """

    limits: DeviceLimits
    fast: Any
    plain: _DecodeLaunch | None = None


_launches: Remembered[_Launches] = Remembered()
_launches_by_splits: Remembered[_DecodeLaunch] = Remembered()
"""The portable kernels by the split count instead of the longest sequence, which grows with every step."""


def _hopper_launch(
    same: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, options: Options,
    limits: DeviceLimits, max_query_len: int, visible: int, num_splits: int | None, num_counters: int, kernels: str,
) -> Any:  # fmt: skip
    if (
        limits.capability[0] != 9
        or kernels == "portable"
        or num_splits is not None
        or (fast := hopper_choice()) is None
    ):
        return None
    batch = (query, key, value, block_table, starts)
    return fast.find_decode(
        same,
        *batch,
        options,
        limits,
        max(1, max_query_len),
        visible,
        kernels == "hopper",
        num_counters=num_counters,
    )


def _launch(
    launch: _DecodeLaunch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    options: Options,
    partials: Tensor | None,
) -> None:
    """Attention, and the joining of its splits."""
    out, index = options.out, launch.index
    tensors = attention_tensors(query, key, value, starts, seq_lens, options, launch.as_bytes)
    addresses = query.data_ptr() | key.data_ptr() | value.data_ptr()
    written = out.data_ptr() | (0 if partials is None else partials.data_ptr())
    launch.attend(
        (*tensors, *launch.numbers, block_table, launch.table_stride, partials, *launch.last),
        addresses | written,
        index,
    )
    if launch.combine is not None:
        launch.combine(
            (partials, options.sinks, out, options.lse, *launch.combine_numbers), written, index
        )


def _prepare(
    same: tuple[Any, ...],
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
    num_splits: int | None,
) -> _DecodeLaunch:
    """Choose splits and tile, and find or make the launch that goes with them."""
    num_reqs = seq_lens.shape[0]
    if num_reqs > _MOST_REQUESTS:
        raise ContractError(
            f"a decode batch of {num_reqs} requests is beyond {_MOST_REQUESTS}; call once for each part of it"
        )
    balanced, work = num_splits is None, None
    if num_splits is None:
        causal, window, chunk = options.causal is True, options.window, options.attention_chunk_size
        visible = visible_bound(max_query_len, max_seq_len, window, causal, chunk)
        work = relevant_work_class(
            "decode", num_reqs, key.shape[2], visible, limits.num_sms, limits.tuned
        )
        num_splits = paged_decode_num_splits(
            query, key, value.shape[3], num_reqs=num_reqs, max_query_len=max_query_len, max_seq_len=max_seq_len,
            causal=causal, window=window, attention_chunk_size=chunk,
        )  # fmt: skip
    identity = (same, max_query_len, num_splits, balanced, work)
    launch = _launches_by_splits.get(identity)
    if launch is not None and launch.limits is limits:
        return launch
    signature = signature_of(query, key, value, options, limits)
    plan, constants = _constants(signature, max_query_len, num_splits > 1, balanced, work)
    num_tokens, num_heads, _ = query.shape
    out, lse = options.out, options.lse
    return _launches_by_splits.keep(identity, _DecodeLaunch(
        limits, query.get_device(), attention_numbers(query, key, value, starts, options), block_table.stride(0),
        (num_splits, plan.groups / plan.slots, num_heads),
        (num_splits, num_tokens, num_heads, out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)),
        paged_decode_workspace_bytes(num_tokens, num_heads, value.shape[3], num_splits) // 4, signature.fp8_as_bytes,
        BoundLaunch(decode_kernel, (plan.groups, num_splits, num_reqs + 1), constants),
        _combination(signature, num_tokens, options) if num_splits > 1 else None,
    ))  # fmt: skip


def _combination(signature: Signature, num_tokens: int, options: Options) -> BoundLaunch:
    """The launch of the combining kernel."""
    num_heads, head_size_v = signature.query_shape[1], signature.value_shape[2]
    constants = {
        "HAS_SINK": options.sinks is not None,
        "HAS_LSE": options.lse is not None,
        "DV": head_size_v,
        "DV_PAD": next_power_of_2(head_size_v),
        "STEP": _COMBINE_STEP,
        "num_warps": 4,
        "enable_fp_fusion": True,
        **programmatic_launch(signature.limits),
    }
    return BoundLaunch(combine_kernel, (num_tokens, num_heads, 1), constants)


def _partials(
    workspace: Tensor | None, floats: int, launch: _DecodeLaunch, device: torch.device
) -> Tensor:
    """The float32 workspace, checked or made."""
    if workspace is None:
        return torch.empty(floats, dtype=torch.float32, device=device)
    have = workspace.numel() * workspace.element_size()
    if have < 4 * floats:
        num_splits, num_tokens, num_heads = launch.combine_numbers[:3]
        raise ContractError(
            f"workspace holds {have} bytes and {4 * floats} are needed for {num_tokens} tokens, {num_heads} heads and "
            f"{num_splits} splits; allocate what paged_decode_workspace_bytes says for them, or pass a smaller num_splits"
        )
    return workspace if workspace.dtype == torch.float32 else workspace.view(torch.float32)
