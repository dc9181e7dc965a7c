"""Decode over the paged cache: few query tokens per request, bound by reading keys and values once.

One program per (group of heads, split, request). A long request's keys are split over several
programs; their partial results (float32, in the workspace) are combined by a second kernel. A
request with one split is written directly. The split follows Flash-Decoding, the packing of query
heads into rows follows FlashAttention's GQA packing.

On Hopper, a Gluon kernel (`hopper/`) serves the calls that it supports and is faster at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_dtype import KVFormat, page_format
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of, programmatic_launch
from attnlib.ops.triton.heuristics.page_tiles import (
    choose_page_decode_tile,
    page_ctas_per_sm,
    page_shared_bytes,
)
from attnlib.ops.triton.heuristics.splits import (
    MAX_CTAS_PER_SM,
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    most_splits,
    paged_decode_workspace_bytes,
    splits_of_keys,
    visible_bound,
)
from attnlib.ops.triton.heuristics.tile_table import depends_on_work, work_class
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    choose_decode_tile,
    choose_latent_tile,
    key_chunks,
    latents_in_place,
    next_power_of_2,
    shared_bytes,
)
from attnlib.ops.triton.hopper.support import (
    hopper_decode_keys,
    hopper_reads,
    latent_decode_keys,
)
from attnlib.ops.triton.kernels.decode import combine_kernel, decode_kernel
from attnlib.ops.triton.launch.attention import (
    BatchTensors,
    PlainAttention,
    attention_constants,
    attention_numbers,
    check_batch,
    holds_scales,
    reads_bytes,
    vector_elements,
)
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention
from attnlib.ops.triton.launch.score import count_score_tiles
from attnlib.ops.triton.launch.signature import batch_signature, call_signature

__all__ = [
    "AttentionShape",
    "DecodeSchedule",
    "paged_decode",
    "paged_decode_num_splits",
    "paged_decode_workspace_bytes",
    "prepare_decode",
    "prepare_plain_decode",
    "schedule_decode",
    "shape_of",
]

_COMBINE_STEP = 16
_MAX_REQUESTS = 65534
"""Limit of a grid's third dimension, less the programs for rows past the last request."""


class AttentionShape(NamedTuple):
    """The sizes and dtypes of a layer that tiles and splits follow from; `score_tiles` and `latent`
    as in `tiles.shared_bytes`, `aligned` as in `tiles.latents_in_place`, `page_format` of a cache
    with scales in its pages (M16)."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    score_tiles: int = 0
    latent: bool = False
    aligned: bool = True
    page_format: KVFormat | None = None


def shape_of(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> AttentionShape:
    """The shape of a call."""
    stored = page_format(key, params.k_scale)
    size_v = value.shape[-1] if stored is None else stored.head_size(value.shape[-1])
    return AttentionShape(
        query.shape[1], key.shape[-2], query.shape[2], size_v, query.dtype, key.dtype,
        count_score_tiles(params), values_are_prefix(key, value), vector_elements("key", key) > 1,
        stored,
    )  # fmt: skip


class DecodeTiling(NamedTuple):
    """Tile and grid of the plain decode kernel.

    Attributes:
        tile: rows and keys of a tile.
        ctas: programs per request and split.
        max_resident_ctas: programs that the chip runs at a time.
        packing: how query heads and tokens share the rows of a tile (compile-time arguments).
    """

    tile: Tile
    ctas: int
    max_resident_ctas: int
    packing: dict[str, int]


@functools.lru_cache(maxsize=512)
def decode_tiling(
    shape: AttentionShape, limits: DeviceLimits, max_query_len: int, keys_per_sm: int | None
) -> DecodeTiling:
    """Tile and grid for queries of at most `max_query_len` tokens.

    Args:
        keys_per_sm: class of work that the tile depends on; None takes the tile that serves any.
    """
    group = shape.num_heads // shape.num_kv_heads
    sizes = (shape.head_size, shape.head_size_v)
    element_bytes = (shape.query_dtype.itemsize, shape.cache_dtype.itemsize)
    problem = (
        *sizes, *element_bytes, group * max_query_len, limits.shared_memory, limits.products,
        shape.score_tiles,
    )  # fmt: skip
    stored = shape.page_format
    if stored is not None:
        tile = choose_page_decode_tile(
            group * max_query_len, stored, *sizes, element_bytes[0], limits
        )
    elif shape.latent:
        tile = choose_latent_tile(
            *problem, in_place=latents_in_place(limits.capability, *element_bytes, shape.aligned),
            native_fp8=limits.has_fp8, tuned=limits.tuned,
        )  # fmt: skip
    else:
        tile = choose_decode_tile(
            *problem, keys_per_sm=keys_per_sm, native_fp8=limits.has_fp8, tuned=limits.tuned
        )
    tile_heads = min(group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(group, tile_heads)
    need = shared_bytes(
        tile, *sizes, *element_bytes, limits.products, shape.score_tiles, shape.latent,
        limits.has_fp8,
    )  # fmt: skip
    if stored is not None:
        need = page_shared_bytes(tile, stored, *sizes, element_bytes[0], limits.products)
    most = MAX_CTAS_PER_SM if stored is None else page_ctas_per_sm(tile)
    resident = max(1, min(most, limits.shared_memory_per_sm // need))
    ctas = shape.num_kv_heads * head_blocks * triton.cdiv(max_query_len, tile_tokens)
    packing = {"TILE_HEADS": tile_heads, "TILE_TOKENS": tile_tokens, "HEAD_BLOCKS": head_blocks}
    return DecodeTiling(tile, ctas, limits.num_sms * resident, packing)


class DecodeSchedule(NamedTuple):
    """What a decode's launches follow from in the bounds of a batch: part of the launch key.

    Attributes:
        max_query_len: upper bound of the query lengths, at least 1.
        num_splits: upper bound of the splits per request.
        balanced: whether requests are split by their length; else each into `num_splits`.
        keys_per_sm: class of work of the plain kernel's tile.
        uses_hopper: whether the Hopper decode is preferred where it supports the call.
        hopper_keys_per_sm: class of work of its tile.
        max_ctas: CTAs of the Hopper decode, where a prefill runs concurrently; None means all.
    """

    max_query_len: int
    num_splits: int
    balanced: bool
    keys_per_sm: int | None
    uses_hopper: bool
    hopper_keys_per_sm: int | None = None
    max_ctas: int | None = None


def schedule_decode(
    shape: AttentionShape,
    limits: DeviceLimits,
    *,
    num_reqs: int,
    max_query_len: int,
    visible: int,
    num_splits: int | None = None,
    kernels: str = "auto",
) -> DecodeSchedule:
    """Splits and kernel preference of a decode, by upper bounds only.

    Args:
        visible: the most keys that a request's queries see (`visible_bound`).
        num_splits: None chooses; a number splits every request into that many.
        kernels: as in `paged_decode`.
    """
    if num_splits is not None:
        return DecodeSchedule(max(1, max_query_len), num_splits, False, None, False)
    return decode_schedules(
        shape, limits, num_reqs=num_reqs, max_query_len=max_query_len, kernels=kernels
    )(visible)


def decode_schedules(
    shape: AttentionShape,
    limits: DeviceLimits,
    *,
    num_reqs: int,
    max_query_len: int,
    most_visible: int | None = None,
    kernels: str = "auto",
) -> Callable[[int], DecodeSchedule]:
    """The schedule of a decode as a function of the length of its longest request.

    A builder keeps it for batches of equal sizes, whose lengths grow in every step.

    Args:
        most_visible: the most keys that a request's queries see of any length; None has no bound.
        kernels: as in `paged_decode`.
    """
    max_query_len = max(1, max_query_len)
    num_sms, tuned = limits.num_sms, limits.tuned
    counts = (num_reqs, shape.num_kv_heads)
    hopper_keys: int | None = None  # from which the Hopper decode is preferred
    if limits.capability[0] == 9 and kernels != "portable":
        if kernels == "hopper":
            hopper_keys = 0
        elif shape.latent:
            hopper_keys = latent_decode_keys(num_reqs, shape.num_heads, max_query_len, num_sms)
        else:
            hopper_keys = hopper_decode_keys(*counts, num_sms, shape.cache_dtype, shape.head_size)
    work_matters, hopper_work_matters = (
        depends_on_work(op, tuned) for op in ("decode", "hopper_decode")
    )

    def splits_for(work: int | None) -> tuple[int, int]:
        tiling = decode_tiling(shape, limits, max_query_len, work)
        most = most_splits(num_reqs, tiling.ctas, tiling.max_resident_ctas)
        return tiling.tile.block_n, most

    of_any_work = None if work_matters else splits_for(None)

    def schedule(max_seq_len: int) -> DecodeSchedule:
        visible = max_seq_len
        if most_visible is not None and visible > most_visible:
            visible = most_visible
        work = hopper_work = None
        if work_matters:
            work = work_class(*counts, visible, num_sms)
        block_n, most = of_any_work or splits_for(work)
        num_splits = splits_of_keys(visible, block_n, most)
        uses_hopper = hopper_keys is not None and visible >= hopper_keys
        if uses_hopper and hopper_work_matters:
            hopper_work = work_class(*counts, visible, num_sms)
        return DecodeSchedule(max_query_len, num_splits, True, work, uses_hopper, hopper_work)

    return schedule


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
    latent: bool = False,
) -> int:
    """The bound on splits that `paged_decode` uses when it is given none: to size a workspace.

    Args:
        query: any tensor `[*, Hq, D]` of the dtype and on the device that will be used.
        key_cache: any cache `[*, N, Hkv, D]`, likewise.
        head_size_v: Dv.
        num_reqs: requests of the batch.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        causal: False also covers causality per request.
        window: (left, right), -1 unbounded.
        attention_chunk_size: 0 is none.
        latent: the values are a prefix of the keys (P10).
    """
    visible = visible_bound(max_query_len, max_seq_len, window, causal, attention_chunk_size)
    shape = AttentionShape(
        query.shape[1], key_cache.shape[2], query.shape[2], head_size_v, query.dtype,
        key_cache.dtype, latent=latent,
    )  # fmt: skip
    return schedule_decode(
        shape, limits_of(query), num_reqs=num_reqs, max_query_len=max_query_len, visible=visible,
        kernels="portable",
    ).num_splits  # fmt: skip


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
    """Attention for batches whose queries are all short (typically 1 to 8 tokens).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32.
        key_cache: `[B, N, Hkv, D]`, strided (P1).
        value_cache: `[B, N, Hkv, Dv]`, strided.
        block_table: `[R, M]` int32.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        params: scale, mask, biases, sinks and KV scales.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given (M5).
        query_start_loc_cpu: ignored; see `attnlib.ops.torch.paged_prefill`.
        seq_lens_cpu: ignored, likewise.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).
        num_splits: programs that may share one request's keys. None: chosen from the bounds, and
            used by length (long requests get more splits). A number splits every request into that
            many. Not read with `batch_invariant`, which divides keys into segments of fixed size.
        workspace: contiguous float32 or uint8 tensor of at least
            `paged_decode_workspace_bytes(...)` bytes; allocated when None and needed. The
            Hopper decode needs more (`hopper.dispatch.decode_workspace_bytes`) and is not used
            with less.
        counters: int32 zeros (`hopper.dispatch.num_counters` of them). With them the Hopper decode
            combines splits in its own kernel and leaves zeros; None, or fewer: a second kernel
            combines. Concurrent calls need counters of their own.
        kernels: "auto" uses the Hopper decode where it supports the call and is faster, "hopper"
            wherever it supports it, "portable" never.

    Raises:
        ContractError: a workspace that is too small, counters that are not int32, or tensors that
            the kernels cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    if query.numel() == 0:
        return
    limits = limits_of(query)
    batch = BatchTensors(
        query_start_loc, seq_lens, block_table,
        params.causal if isinstance(params.causal, Tensor) else None, params.query_bias, workspace,
        counters, max_seq_len, params.batch_score_tensors(),
    )  # fmt: skip
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import run_invariant_decode

        run_invariant_decode(
            query, key_cache, value_cache, out, lse, batch, params, max_query_len, kernels
        )
        return
    shape = shape_of(query, key_cache, value_cache, params)
    visible = visible_bound(
        max_query_len, max_seq_len, params.window, params.causal is True,
        params.attention_chunk_size,
    )  # fmt: skip
    schedule = schedule_decode(
        shape, limits, num_reqs=seq_lens.shape[0], max_query_len=max_query_len, visible=visible,
        num_splits=num_splits, kernels=kernels,
    )  # fmt: skip
    signature = call_signature(query, key_cache, value_cache, out, lse, params)
    tensors = (query, key_cache, value_cache, out, lse)
    prepared = prepare_decode(signature, *tensors, batch, params, limits, schedule)
    if prepared.needs_alignment and not _fits_hopper(
        prepared, batch, query, key_cache, value_cache, out
    ):
        prepared = prepare_plain_decode(signature, *tensors, batch, params, limits, schedule)
    run_attention(prepared, batch, query, key_cache, value_cache, out, lse, params)


def _fits_hopper(prepared: PreparedAttention, batch: BatchTensors, *tensors: Tensor) -> bool:
    """Whether addresses and workspace allow a prepared Hopper launch."""
    space, addresses = batch.workspace, 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return not addresses & ALIGNMENT and (space is None or space.nbytes >= prepared.workspace_bytes)


def prepare_decode(
    signature: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    schedule: DecodeSchedule,
) -> PreparedAttention:
    """The launches for calls of this signature: the Hopper decode where the schedule prefers it and
    it supports the call, else the plain kernels. Cached.

    Raises:
        ContractError: tensors that the kernels cannot address.
    """
    num_counters = 0 if batch.counters is None else batch.counters.numel()
    key_ = ("decode", signature, batch_signature(batch), schedule)
    found: PreparedAttention | None = LAUNCHES.get(key_)
    if found is not None and found.limits is limits:
        return found
    check_batch(batch, schedule.max_query_len)
    prepared: PreparedAttention | None = None
    if (
        schedule.uses_hopper
        and (not holds_scales(params) or hopper_reads(page_format(key, params.k_scale)))
        and (dispatch := hopper.load()) is not None
    ):
        prepared = dispatch.select_decode(
            query, key, value, out, lse, batch, params, limits, schedule.max_query_len,
            schedule.hopper_keys_per_sm, schedule.max_ctas, num_counters,
        )  # fmt: skip
    if prepared is None:
        prepared = prepare_plain_decode(
            signature, query, key, value, out, lse, batch, params, limits, schedule
        )
    kept: PreparedAttention = LAUNCHES.keep(key_, prepared)
    return kept


def prepare_plain_decode(
    signature: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    schedule: DecodeSchedule,
) -> PlainAttention:
    """The plain launches for calls of this signature. Cached.

    Raises:
        ContractError: tensors that the kernels cannot address, or too many requests for one grid.
    """
    max_query_len, num_splits, balanced, work = schedule[:4]
    key_ = ("plain decode", signature, batch_signature(batch), schedule[:4])
    found: PlainAttention | None = LAUNCHES.get(key_)
    if found is not None and found.limits is limits:
        return found
    num_reqs, table = batch.seq_lens.shape[0], batch.block_table
    assert table is not None
    if num_reqs > _MAX_REQUESTS:
        raise ContractError(
            f"a decode batch of {num_reqs} requests exceeds the limit of {_MAX_REQUESTS}; split it "
            "into several calls"
        )
    check_batch(batch, max_query_len)
    shape = shape_of(query, key, value, params)
    if holds_scales(params):
        return _prepare_page_decode(
            key_, query, key, value, out, lse, batch, params, limits, schedule
        )
    constants = attention_constants(query, key, value, out, lse is not None, params, limits)
    tiling = decode_tiling(shape, limits, max_query_len, work)
    element, tile = query.element_size(), tiling.tile
    sizes = (shape.head_size, shape.head_size_v)
    constants |= {
        **tiling.packing,
        **key_chunks(sizes, tile, element, limits.products, shape.latent),
        **programmatic_launch(limits),
        "SPLIT": num_splits > 1,
        "BALANCED": balanced,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        "BLOCK_M": tiling.tile.block_m,
        "BLOCK_N": tiling.tile.block_n,
        "num_warps": tiling.tile.num_warps,
        "num_stages": tiling.tile.num_stages,
        "enable_fp_fusion": True,
    }
    num_tokens, num_heads, _ = query.shape
    stride_lt = 0 if lse is None else lse.stride(0)
    prepared = PlainAttention(
        limits,
        query.get_device(),
        BoundLaunch(decode_kernel, (tiling.ctas, num_splits, num_reqs + 1), constants),
        attention_numbers(query, key, value, batch.query_start_loc, out, lse, params),
        table.stride(0),
        (num_splits, tiling.ctas / tiling.max_resident_ctas, num_heads),
        as_bytes=reads_bytes(key.dtype, limits),
        is_decode=True,
        combine=_combine_launch(shape, limits, num_tokens, lse is not None, params)
        if num_splits > 1
        else None,
        score_tensors=params.layer_score_tensors(),
        num_batch_tensors=len(batch.score_tensors),
        combine_tail=(num_splits, num_tokens, num_heads, out.stride(0), out.stride(1), stride_lt),
        workspace_bytes=paged_decode_workspace_bytes(
            num_tokens, num_heads, shape.head_size_v, num_splits
        ),
    )
    kept: PlainAttention = LAUNCHES.keep(key_, prepared)
    return kept


def _prepare_page_decode(
    key_: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    schedule: DecodeSchedule,
) -> PlainAttention:
    """The launches over pages that hold their scales (M16)."""
    from attnlib.ops.triton.page_attention import page_decode

    shape = shape_of(query, key, value, params)
    combine = None
    if schedule.num_splits > 1:
        combine = _combine_launch(shape, limits, query.shape[0], lse is not None, params)
    tiling = decode_tiling(shape, limits, schedule.max_query_len, None)
    prepared = page_decode(
        query, key, value, out, lse, batch, params, limits, tiling, schedule.num_splits,
        schedule.balanced, combine,
    )  # fmt: skip
    kept: PlainAttention = LAUNCHES.keep(key_, prepared)
    return kept


def _combine_launch(
    shape: AttentionShape,
    limits: DeviceLimits,
    num_tokens: int,
    has_lse: bool,
    params: AttentionParams,
) -> BoundLaunch:
    """The launch of the kernel that combines splits."""
    constants = {
        "HAS_SINK": params.sinks is not None,
        "HAS_LSE": has_lse,
        "DV": shape.head_size_v,
        "DV_PAD": next_power_of_2(shape.head_size_v),
        "STEP": _COMBINE_STEP,
        "num_warps": 4,
        "enable_fp_fusion": True,
        **programmatic_launch(limits),
    }
    return BoundLaunch(combine_kernel, (num_tokens, shape.num_heads, 1), constants)
