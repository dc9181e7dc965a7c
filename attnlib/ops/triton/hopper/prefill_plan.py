"""Host side of the Hopper prefill: tile, grid, descriptors and argument order.

`support.prefill_unsupported_reasons` lists what the kernel does not implement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.hopper_tiles import (
    HopperTile,
    choose_section,
    key_parts,
    padded_width,
)
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    QueryView,
    TransposedView,
    described,
    descriptor_arguments,
    encode_views,
    encoded_descriptors,
    gathered_strides,
)
from attnlib.ops.triton.hopper.kernels.consumer_state import BOUNDED
from attnlib.ops.triton.hopper.kernels.prefill import hopper_prefill_kernel
from attnlib.ops.triton.hopper.kernels.prefill_call import PrefillConfig
from attnlib.ops.triton.hopper.kernels.value_columns import PART_ELEMENTS, PART_KEYS
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.sizes import gathers
from attnlib.ops.triton.kernels.quant import KV_PLAIN
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LaunchCache
from attnlib.ops.triton.launch.run import run_attention
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind
from attnlib.ops.triton.launch.score import (
    batch_score_values,
    has_head_bounds,
    range_constants,
    score_arguments,
    score_constants,
    tensor_sizes,
)
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY_CACHE,
    KEY_MAP,
    LSE,
    OUT,
    QUERY,
    QUERY_MAP,
    SINKS,
    V_SCALE,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Lookup,
    Source,
    batch_sources,
    bind_step,
    score_sources,
)

__all__ = ["HopperPrefill", "launch_hopper_prefill", "prepare_hopper_prefill"]

_UNBOUNDED = 1 << 30
_REGISTERS = 64 * 1024
"""Registers of a multiprocessor."""
_FEW_ITEMS_PER_SM = 4
"""Work items per multiprocessor up to which they are not ordered by sections. Sections order the
items of all requests several times, and the last of few items may be a long one."""

_MOST_BOUNDED_CAP = 64.0
"""Soft cap up to which bfloat16 weights need no running maximum (`softmax.bounded_softmax`). Its
tanh is too coarse for float16, whose range does not hold the weights either."""

_NUM_BATCH_VALUES = 5
"""Values of a batch that the kernel takes, besides those of its score function."""


@dataclass(frozen=True, eq=False)
class HopperPrefill:
    """The launch of one call signature of the Hopper prefill, without addresses.

    Attributes:
        limits: the chip that tile and grid were chosen for.
        index: the device index.
        tile: tile shape, pipeline stages and grid policy.
        num_kv_heads: Hkv.
        shared: work items with the same query tokens and KV head, each with other query heads.
        views: the key and value cache as TMA reads them.
        query_view: the queries as TMA reads them; None where the kernel loads queries itself.
        scale: softmax scale; times `k_scale` where the cache is not quantized.
        scales: which scales of the cache each call gives: those that are not part of `scale`.
        score_sizes: sizes of the layer tensors of the score function.
        numbers: the runtime numbers between the scale and `concurrent`.
        last: the runtime numbers after the section.
        attend: the kernel.
        num_batch_tensors: number of batch tensors of the score function.
        totals_bytes: global memory of the batch-invariant kernel for sums of values that do not fit
            in shared memory, 0 for none; None for the other kernel.
        key_parts: parts of a key in shared memory, each as wide as a TMA box.
        num_items: work items, an upper bound.
        gathers: the kernel reads the caches by address instead of descriptors.
        cache_strides: the kernel's last arguments: strides of keys and values in bytes, where
            it gathers their rows, None where it could; empty for kernels that cannot.
    """

    limits: DeviceLimits
    index: int
    tile: HopperTile
    num_kv_heads: int
    shared: int
    views: tuple[CacheView, CacheView | TransposedView]
    query_view: QueryView | None
    scale: float
    scales: tuple[Source | None, Source | None]
    score_sizes: tuple[int, ...]
    numbers: tuple[float | int, ...]
    last: tuple[int, ...]
    attend: BoundLaunch
    num_batch_tensors: int = 0
    totals_bytes: int | None = None
    key_parts: int = 1
    num_items: int = 0
    gathers: bool = False
    cache_strides: tuple[int | None, ...] = ()

    needs_alignment: ClassVar[bool] = True
    """TMA requires aligned tensors, also for launches by Triton."""
    as_bytes: ClassVar[bool] = False
    workspace_bytes: ClassVar[int] = 0

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.attend,)

    @property
    def num_batch_values(self) -> int:
        """The number of values of a batch."""
        return _NUM_BATCH_VALUES + bool(self.totals_bytes) + 3 * self.num_batch_tensors

    def launches(
        self,
        direct: bool,
        aligned: bool = True,
        concurrent: bool = False,
        maps: tuple[Source, Source] | None = None,
    ) -> Launches:
        """The launch. The order of the kernel's arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
            concurrent: start while the kernel launched before still runs. That kernel must release
                its successor early and must have waited for everything before itself.
            maps: values of a batch that are the descriptors of keys and values; None for those of
                the caches of a call.
        """
        starts, lens, table, counters, section = batch_sources(_NUM_BATCH_VALUES)
        totals: tuple[Any, ...] = () if self.totals_bytes is None else (None,)
        if self.totals_bytes:
            totals = batch_sources(1, _NUM_BATCH_VALUES)
        pointers, sizes = score_arguments(
            self.score_sizes, self.num_batch_tensors, _NUM_BATCH_VALUES
        )
        layer_tensors = score_sources(len(self.score_sizes) // 2)
        caches: tuple[Any, ...] = (KEY_CACHE, VALUE_CACHE)
        if not self.gathers:
            caches = descriptor_arguments(self.views, maps or (KEY_MAP, VALUE_MAP), direct)
        query_map: tuple[Any, ...] = (None,)
        if self.query_view is not None:
            query_map = descriptor_arguments((self.query_view,), (QUERY_MAP,), direct)
        arguments = (
            *caches, *query_map, QUERY, OUT, LSE, SINKS, *self.scales, *layer_tensors, *pointers,
            starts, lens, table, counters, *totals, self.scale, *self.numbers, int(concurrent),
            section, *self.last, *sizes, *self.cache_strides,
        )  # fmt: skip
        step = bind_step(self.attend, direct, aligned, arguments)
        return Launches((step,), self._lookups(direct, maps is None))

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch, with counters if it has none or too few for a persistent kernel, and with
        memory for totals."""
        if self.totals_bytes:
            device = batch.query_start_loc.device
            space = torch.empty(self.totals_bytes // 4, dtype=torch.float32, device=device)
            batch = batch._replace(workspace=space)
        counters = batch.counters
        if not self.tile.persistent or (
            counters is not None and counters.numel() >= PREFILL_COUNTERS
        ):
            return batch
        device = batch.query_start_loc.device
        counters = torch.zeros(PREFILL_COUNTERS, dtype=torch.int32, device=device)
        return batch._replace(counters=counters)

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its counters are not aligned."""
        table, score, counters = batch.block_table, batch.score_tensors, None
        assert table is not None
        if self.tile.persistent:
            assert batch.counters is not None  # see `with_scratch`
            counters = batch.counters.data_ptr()
            if counters & ALIGNMENT:
                return None
        totals: tuple[int, ...] = ()
        if self.totals_bytes:
            assert batch.workspace is not None  # see `with_scratch`
            totals = (batch.workspace.data_ptr(),)
        return (
            batch.query_start_loc.data_ptr(), batch.seq_lens.data_ptr(), table.data_ptr(),
            counters, self._section(batch.max_seq_len), *totals,
            *(batch_score_values(score, True) if score else ()),
        )  # fmt: skip

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        return (
            batch.query_start_loc, batch.seq_lens, batch.block_table,
            batch.counters if self.tile.persistent else None, self._section(batch.max_seq_len),
            *((batch.workspace,) if self.totals_bytes else ()),
            *batch_score_values(batch.score_tensors, False),
        )  # fmt: skip

    def _section(self, max_seq_len: int) -> int:
        """Heads of a section of work items: KV heads, times the work items that share one."""
        heads, (key_view, value_view) = self.num_kv_heads, self.views
        if self.tile.sections and self.num_items >= _FEW_ITEMS_PER_SM * self.limits.num_sms:
            width = self.key_parts * key_view.width
            width_v = width if isinstance(value_view, TransposedView) else value_view.width
            heads = choose_section(heads, max_seq_len, width + width_v)
        return heads * self.shared

    def _lookups(self, direct: bool, of_caches: bool) -> tuple[Lookup, ...]:
        """The descriptors of a call, with or without those of its caches."""
        caches, maps, view = (KEY_CACHE, VALUE_CACHE), (KEY_MAP, VALUE_MAP), self.query_view
        found: list[Lookup] = []
        if of_caches and not self.gathers:
            found.append(
                Lookup(caches, self._descriptors, self._encode, maps)
                if direct
                else described(self.views, caches, maps)
            )
        if view is not None:
            found.append(
                Lookup((QUERY,), self._query_descriptors, self._encode_query, (QUERY_MAP,))
                if direct
                else described((view,), (QUERY,), (QUERY_MAP,))
            )
        return tuple(found)

    @cached_property
    def _descriptors(self) -> LaunchCache:
        """Encoded descriptors of caches like this one; known once the kernel has been launched."""
        return encoded_descriptors(self.views, self.attend)

    @cached_property
    def _query_descriptors(self) -> LaunchCache:
        """Encoded descriptors of queries like these; likewise."""
        return encoded_descriptors(self.query_view, self.attend)

    def _encode(self, key: int, value: int) -> tuple[Any, ...]:
        """Encode and keep the descriptors of the caches at these addresses."""
        return encode_views(self._descriptors, self.attend, self.views, (key, value))

    def _encode_query(self, query: int) -> tuple[Any, ...]:
        """Encode and keep the descriptor of the queries at this address."""
        assert self.query_view is not None
        return encode_views(
            self._query_descriptors, self.attend, (self.query_view,), query,
            first=0 if self.gathers else 2,
        )  # fmt: skip


def prepare_hopper_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    tile: HopperTile,
    limits: DeviceLimits,
    one_head: bool = False,
    invariant: bool = False,
    unpaged: bool = False,
    transposed: TransposedView | None = None,
) -> HopperPrefill:
    """Prepare the launch of calls like this one with a given tile; at least one query and block.

    With `one_head` a work item has one query head, and uses `ScoreFunction.head_bounds`. With
    `invariant`, the batch-invariant kernel. With `unpaged`, keys and values `[1, Tk, Hkv, D]` are
    packed, and the batch has the first row of each request's keys as `seq_lens` and as
    `block_table`. With `transposed` values, the kernel with float8 products over packed keys.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, _ = key.shape
    block_size = 0 if unpaged else block_size
    assert batch.block_table is not None
    head_size_v, shared = value.shape[3], num_heads // num_kv_heads if one_head else 1
    group = num_heads // num_kv_heads // shared
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    # The batch-invariant kernel and gathered rows keep keys undivided.
    undivided = invariant or gathers(block_size)
    parts = 1 if undivided else key_parts(head_size, key.element_size())
    width = width if parts == 1 else 64
    split = max(width, width_v) > 256  # consumers share rows and split the value elements
    box, rows = min(block_size or tile.block_n, tile.block_n), 64 * (1 if split else tile.consumers)
    tile_tokens, num_reqs = rows // group, batch.query_start_loc.shape[0] - 1
    left, right = params.window
    chunk, cap = params.attention_chunk_size, params.logits_soft_cap
    # Tiles of the batch-invariant kernel begin at fixed positions: two of a request are incomplete.
    num_tiles = num_tokens // tile_tokens + (2 if invariant else 1) * num_reqs + 1
    items = num_tiles * num_kv_heads * shared
    box_tokens, box_heads = (64 // group, group) if group <= 64 else (1, 64)
    load_query = tile_tokens * group == rows and (64 % group == 0 or group % 64 == 0)
    bounded = (
        0 < cap <= _MOST_BOUNDED_CAP
        and (query.dtype, key.dtype) == (torch.bfloat16, torch.bfloat16)
        and params.score_function is None
        and not invariant
    )
    functions = score_constants(params, "gluon", True, key.dtype.itemsize > 1)
    functions |= (ranges := range_constants(params, "gluon", one_head))
    if ranges["EXACT"]:
        functions |= {"SCORE": None, "RAW_SCORE": False, "KEY_SLOPE": None}
    config = PrefillConfig(
        NUM_KV_HEADS=num_kv_heads,
        SHARED=shared,
        GROUP=group,
        D=head_size,
        DV=head_size_v,
        WIDTH=width,
        WIDTH_V=width_v,
        TILE_TOKENS=tile_tokens,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=block_size,
        STAGES=tile.stages,
        Q_STAGES=tile.q_stages,
        CONSUMERS=tile.consumers,
        LOAD_QUERY=load_query,
        PERSISTENT=tile.persistent,
        STAGED_STORE=tile.staged_store and width == width_v and not split,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=chunk > 0,
        HAS_CAP=BOUNDED.value if bounded else cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=lse is not None,
        KV_KIND=kv_kind(key.dtype, has_fp8=False),
        K_SCALE_KIND=scale_kind("k_scale", params.k_scale),
        V_SCALE_KIND=scale_kind("v_scale", params.v_scale),
        RANGES=ranges["RANGES"],
        EXACT=ranges["EXACT"],
        RAW_SCORE=functions["RAW_SCORE"],
        GATHERS=gathers(block_size),
        SPLIT_V=split,
        KEY_PARTS=parts,
        BYTE_STAGES=tile.byte_stages,
        CONVERTER_WARPS=tile.converter_warps,
        CONVERTER_REGISTERS=tile.converter_registers,
        QUERY_REGISTERS=tile.query_registers,
    )
    options = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True}
    kernel, totals_bytes, value_parts = hopper_prefill_kernel, None, 0
    if invariant:
        kernel, constants = _invariant(config)
        if tile.ctas_per_sm > 1:
            threads = tile.ctas_per_sm * 128 * (tile.consumers + 1)
            options["maxnreg"] = _REGISTERS // threads // 8 * 8
        # For each CTA, which has one work item at a time.
        totals_bytes = 4 * rows * width_v * limits.num_sms if width_v > 128 else 0
    elif transposed is not None:
        assert load_query
        kernel, constants = _float8(config)
    elif ranges["EXACT"] and _has_range_kernel(config):
        kernel, constants = _range(config, ranges["BOUNDS"])
    else:
        value_parts = _value_parts(config)
        config = config._replace(VALUE_PARTS=value_parts)
        if tile.leads and _has_sign_softmax(config, query.dtype, functions["SCORE"]):
            config = config._replace(SIGN_SOFTMAX=True)
        constants = {name: functions[name] for name in ("SCORE", "KEY_SLOPE", "BOUNDS")}
        constants["CONFIG"] = config
    constants |= options
    query_view = None
    if load_query:
        shape, strides = tuple(query.shape), tuple(query.stride())
        query_view = QueryView(query.dtype, shape, strides, box_tokens, box_heads, width)
    scale, scales = _scales(key.dtype.itemsize == 1, params)
    ctas = tile.ctas_per_sm * limits.num_sms
    grid = (min(items, ctas) if tile.persistent else items, 1, 1)
    return HopperPrefill(
        limits=limits,
        index=query.get_device(),
        tile=tile,
        num_kv_heads=num_kv_heads,
        shared=shared,
        views=(
            CacheView.of(key, box, width),
            transposed
            or CacheView.of(value, box, PART_ELEMENTS.value if value_parts else width_v),
        ),
        query_view=query_view,
        scale=scale,
        scales=scales,
        score_sizes=tensor_sizes(params.layer_score_tensors()),
        num_batch_tensors=len(batch.score_tensors),
        totals_bytes=totals_bytes,
        key_parts=parts,
        num_items=items,
        gathers=gathers(block_size),
        cache_strides=_cache_strides(kernel, key, value),
        numbers=(
            float(cap), min(left, _UNBOUNDED), min(right, _UNBOUNDED), min(chunk, _UNBOUNDED),
            num_reqs, num_tokens, num_tiles,
        ),
        last=(
            num_blocks, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            0 if lse is None else lse.stride(0), batch.block_table.stride(0),
        ),
        attend=BoundLaunch(kernel, grid, constants),
    )  # fmt: skip


def _value_parts(config: PrefillConfig) -> int:
    """The parts of 32 elements that the kernel keeps values in; 0 where it keeps them undivided."""
    divided = (
        config.DV < PART_KEYS.value == config.BLOCK_N
        and config.KV_KIND == KV_PLAIN
        and not config.GATHERS
        and config.KEY_PARTS == 1
        and not config.SPLIT_V
    )
    return -(-config.DV // PART_ELEMENTS.value) if divided else 0


def _has_sign_softmax(config: PrefillConfig, dtype: torch.dtype, score: Any) -> bool:
    """Whether the kernel can look for rising maxima by signs. Weights of float16 would be
    subnormal."""
    sizes = (config.KEY_PARTS, config.WIDTH, config.CONSUMERS, config.BLOCK_N)
    return (
        dtype == torch.bfloat16
        and sizes
        in (
            (1, 128, 2, 128),
            (3, 64, 3, 64),  # parts of 64 elements
        )
        and config.WIDTH_V == 128
        and config.VALUE_PARTS == 0
        and config.KV_KIND == KV_PLAIN
        and not config.GATHERS
        and score is None
        and config.RANGES == 0
        and config.HAS_CAP != BOUNDED.value
    )


def _cache_strides(kernel: Any, key: Tensor, value: Tensor) -> tuple[int | None, ...]:
    """See `HopperPrefill.cache_strides`."""
    if kernel is not hopper_prefill_kernel:
        return ()
    return gathered_strides(key, value) if gathers(key.shape[1]) else (None,) * 6


def _scales(
    is_quantized: bool, params: AttentionParams
) -> tuple[float, tuple[Source | None, Source | None]]:
    """The softmax scale with what it includes of `k_scale`, and the scales that calls give."""
    if is_quantized:
        return params.scale, (K_SCALE, V_SCALE)
    # Only copies of a float8 cache have other scales than 1 for the values, or tensors.
    v_scale = None if _is_one(params.v_scale) else V_SCALE
    if isinstance(params.k_scale, Tensor):
        return params.scale, (K_SCALE, v_scale)
    return params.scale * float(params.k_scale), (None, v_scale)


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def _invariant(config: PrefillConfig) -> tuple[Any, dict[str, Any]]:
    """The batch-invariant kernel and its compile-time arguments."""
    from attnlib.ops.triton.hopper.kernels.invariant_prefill import invariant_prefill_kernel

    return invariant_prefill_kernel, {"CONFIG": config}


def _has_range_kernel(config: PrefillConfig) -> bool:
    """Whether `range_prefill_kernel` takes a layer with exact bounds."""
    return (
        config.KV_KIND == KV_PLAIN
        and not config.GATHERS
        and config.CONSUMERS == 2
        and config.Q_STAGES >= 2
        and config.KEY_PARTS == 1
        and bool(config.LOAD_QUERY and config.STAGED_STORE)
    )


def _float8(config: PrefillConfig) -> tuple[Any, dict[str, Any]]:
    """The kernel with float8 products and its compile-time arguments."""
    from attnlib.ops.triton.hopper.kernels.float8_prefill import float8_prefill_kernel

    return float8_prefill_kernel, {"CONFIG": config}


def _range(config: PrefillConfig, bounds: Any) -> tuple[Any, dict[str, Any]]:
    """The kernel for one range of keys per query and its compile-time arguments."""
    from attnlib.ops.triton.hopper.kernels.range_prefill import range_prefill_kernel

    return range_prefill_kernel, {"BOUNDS": bounds, "CONFIG": config}


def launch_hopper_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    tile: HopperTile,
    *,
    max_seq_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Run the kernel once with a given tile; arguments as in `paged_prefill`.

    Raises:
        ContractError: tensors off 16-byte boundaries.
    """
    if query.numel() == 0:
        return
    batch = BatchTensors(
        query_start_loc, seq_lens, block_table, counters=counters, max_seq_len=max_seq_len,
        score_tensors=params.batch_score_tensors(),
    )  # fmt: skip
    batch.check()
    prepared = prepare_hopper_prefill(
        query, key_cache, value_cache, out, lse, batch, params, tile, limits_of(query),
        has_head_bounds(params),
    )  # fmt: skip
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    run_attention(prepared, call)
