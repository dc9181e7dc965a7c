"""Decode over the paged cache: few query tokens per request, bound by reading keys and values once.

One program per (group of heads, split, request). A long request's keys are split over several
programs; their partial results (float32, in the workspace) are combined by a second kernel. A
request with one split is written directly. The split follows Flash-Decoding, the packing of query
heads into rows follows FlashAttention's GQA packing.

On Hopper, a Gluon kernel (`hopper/`) serves the calls that it supports and is faster at.
"""

from __future__ import annotations

from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.decode_schedule import (
    DecodeSchedule,
    decode_tiling,
    schedule_decode,
)
from attnlib.ops.triton.heuristics.device import limits_of, programmatic_launch
from attnlib.ops.triton.heuristics.splits import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    paged_decode_workspace_bytes,
    visible_bound,
)
from attnlib.ops.triton.hopper.sizes import hopper_reads
from attnlib.ops.triton.kernels.decode import decode_kernel
from attnlib.ops.triton.launch.attention import PlainAttention
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import page_strides
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.run import PreparedAttention, run_attention
from attnlib.ops.triton.page_attention import element_constants

__all__ = [
    "paged_decode",
    "paged_decode_num_splits",
    "paged_decode_workspace_bytes",
    "prepare_decode",
    "prepare_plain_decode",
]

_MAX_REQUESTS = 65534
"""Limit of a grid's third dimension, less the programs for rows past the last request."""


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
    num_heads, head_size = query.shape[1:]
    shape = LayerShape(
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[2],
        head_size=head_size,
        head_size_v=head_size_v,
        query_dtype=query.dtype,
        cache_dtype=key_cache.dtype,
        block_size=key_cache.shape[1],
        latent=latent,
    )
    return schedule_decode(
        shape,
        limits_of(query),
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        visible=visible,
        kernels="portable",
    ).num_splits


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
    batch = BatchTensors.of(
        params,
        query_start_loc,
        seq_lens,
        block_table,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        workspace=workspace,
        counters=counters,
    )
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import run_invariant_decode

        run_invariant_decode(call, kernels)
        return
    bounds, causal = (max_query_len, max_seq_len), params.causal is True
    schedule = schedule_decode(
        call.shape,
        call.limits,
        num_reqs=call.num_reqs,
        max_query_len=max_query_len,
        visible=visible_bound(*bounds, params.window, causal, params.attention_chunk_size),
        num_splits=num_splits,
        kernels=kernels,
    )
    prepared = prepare_decode(call, schedule)
    if prepared.needs_alignment and not _fits_hopper(prepared, call):
        prepared = prepare_plain_decode(call, schedule)
    run_attention(prepared, call)


def _fits_hopper(prepared: PreparedAttention, call: AttentionCall) -> bool:
    """Whether addresses and workspace allow a prepared Hopper launch."""
    space = call.batch.workspace
    is_large = space is None or space.nbytes >= prepared.workspace_bytes
    return is_large and not call.addresses & ALIGNMENT


def prepare_decode(call: AttentionCall, schedule: DecodeSchedule) -> PreparedAttention:
    """The launches for calls of this signature: the Hopper decode where the schedule prefers it and
    it supports the call, else the plain kernels. Cached.

    Raises:
        ContractError: tensors that the kernels cannot address.
    """
    key = ("decode", call.signature, call.batch.form(), schedule)
    found: PreparedAttention | None = LAUNCHES.get(key)
    if found is not None and found.limits is call.limits:
        return found
    call.batch.check()
    prepared: PreparedAttention | None = None
    if (
        schedule.uses_hopper
        and hopper_reads(call.shape.page_format)
        and (dispatch := hopper.load()) is not None
    ):
        prepared = dispatch.select_decode(call, schedule)
    if prepared is None:
        prepared = prepare_plain_decode(call, schedule)
    kept: PreparedAttention = LAUNCHES.keep(key, prepared)
    return kept


def prepare_plain_decode(call: AttentionCall, schedule: DecodeSchedule) -> PlainAttention:
    """The plain launches for calls of this signature. Cached.

    Raises:
        ContractError: tensors that the kernels cannot address, or too many requests for one grid.
    """
    key = ("plain decode", call.signature, call.batch.form(), schedule[:4])
    found: PlainAttention | None = LAUNCHES.get(key)
    if found is not None and found.limits is call.limits:
        return found
    if call.num_reqs > _MAX_REQUESTS:
        raise ContractError(
            f"a decode batch of {call.num_reqs} requests exceeds the limit of {_MAX_REQUESTS}; "
            "split it into several calls"
        )
    call.batch.check()
    shape, num_splits = call.shape, schedule.num_splits
    work = None if shape.page_format is not None else schedule.keys_per_sm
    tiling = decode_tiling(shape, call.limits, schedule.max_query_len, work)
    overlap = programmatic_launch(call.limits)
    partials = Partials.of_splits(
        num_splits,
        *(call.num_tokens, shape.num_heads, shape.head_size_v),
        has_sink=call.params.sinks is not None,
        has_lse=call.lse is not None,
        overlap=overlap,
    )
    splits = {
        "SPLIT": num_splits > 1,
        "BALANCED": schedule.balanced,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
    }
    constants = {
        "ONE_LOOP": True,
        **element_constants(call, tiling.tile),
        **tiling.packing,
        **overlap,
        **splits,
        **tiling.tile.constants,
    }
    grid = (tiling.ctas, num_splits, call.num_reqs + 1)
    waves = tiling.ctas / tiling.max_resident_ctas
    prepared = PlainAttention(
        call,
        BoundLaunch(decode_kernel, grid, with_config(constants)),
        (num_splits, waves, shape.num_heads, *page_strides(call)),
        partials,
    )
    kept: PlainAttention = LAUNCHES.keep(key, prepared)
    return kept
