"""Host side of the Hopper decode: tile, grid, workspace and argument order.

`support.decode_unsupported_reasons` lists what the kernel does not implement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from attnlib.kv_dtype import page_format
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width
from attnlib.ops.triton.heuristics.splits import splits_per_load
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    PackedKeyView,
    PackedValueView,
    described,
    descriptor_arguments,
    encode_views,
    encoded_descriptors,
    gathered_strides,
)
from attnlib.ops.triton.hopper.kernels.cache_tiles import box_keys
from attnlib.ops.triton.hopper.kernels.combine import hopper_combine_kernel
from attnlib.ops.triton.hopper.kernels.decode import hopper_decode_kernel
from attnlib.ops.triton.hopper.kernels.decode_call import DecodeConfig
from attnlib.ops.triton.hopper.kernels.warp_decode import hopper_warp_decode_kernel
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.sizes import gathers
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_PLAIN
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LaunchCache
from attnlib.ops.triton.launch.run import run_attention
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind
from attnlib.ops.triton.launch.score import (
    batch_score_values,
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
    SINKS,
    V_SCALE,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Lookup,
    batch_sources,
    bind_step,
    score_sources,
)

__all__ = [
    "HopperDecode",
    "combine_tile",
    "hopper_decode_workspace_bytes",
    "launch_hopper_decode",
    "prepare_hopper_decode",
    "unbounded",
    "whole_requests",
    "workers_per_head",
]

_NUM_BATCH_VALUES = 7
"""Values of a batch that the kernels take, besides those of its score function."""
_MAX_SPLITS = 511
_UNBOUNDED = 1 << 30

_FEW_ROWS = 1024
"""Rows (tokens times query heads) up to which the combine kernel uses one program per row: fastest
for few rows. With many rows most programs would have nothing to combine."""

_FEW_REGISTERS, _MANY_REGISTERS = 168, 240
"""Registers per thread. A CTA has 256 threads (two warps idle), so either value takes more than
half of an SM's 65536 registers and an SM holds one CTA at a time, however small the tile. In an
experiment, a CTA that waited for its predecessor grid beside a CTA of that grid ended in illegal
addresses."""

_FEW_ELEMENTS = 128 * 32
"""Elements of the output tile of a CTA up to which a thread has the smaller number of registers;
half as many with converted float8 tiles in registers."""

_LEAST_BUSY = 0.7
"""Share of the multiprocessors that read fast enough for all of them. 48 requests of 5k keys with 4
KV heads take 120.2 us on 96 of the 132 of an H200, without splits, and 121.9 on all. Several query
tokens need all: 24 requests of 8 over 2k keys take 68.1 us on 96 and 61.0 on 128."""

_LEAST_BUSY_QUANTIZED = 0.95
"""The same over quantized caches, whose conversion needs more of the multiprocessors. 128 requests
of 2k keys with 8 KV heads take 134.0 us in 32 ranges of whole requests and 136.2 in 33 (e4m3,
H200)."""

_MAX_LOAD_ROUNDS = 8
"""Rounds of loads, about one microsecond each, that combining one request's splits may take."""


def unbounded(number: int) -> int:
    """A side of a window or a chunk as the kernels take it; larger numbers have no effect."""
    return min(number, _UNBOUNDED)


def combine_tile(num_rows: int, group: int, head_size_v: int) -> dict[str, int]:
    """Tile of the combine kernel: heads per program, splits loaded together, warps."""
    if num_rows <= _FEW_ROWS:
        return {"HEADS": 1, "STEP": 32 if head_size_v <= 128 else 16, "num_warps": 1}
    return {"HEADS": min(4, triton.next_power_of_2(group)), "STEP": 8, "num_warps": 4}


def workers_per_head(max_resident_ctas: int, num_kv_heads: int, consumers: int) -> int:
    """Consumers for each KV head: as many as the chip holds at a time, in whole CTAs."""
    workers = min(max(1, consumers * max_resident_ctas // num_kv_heads), _MAX_SPLITS)
    return workers - workers * num_kv_heads % consumers or consumers


def whole_requests(per_head: int, num_reqs: int, max_query_len: int, quantized: bool) -> int:
    """Consumers for each KV head that get equal numbers of requests, where these are at least
    `_LEAST_BUSY` (`_LEAST_BUSY_QUANTIZED`) of `per_head`; else `per_head`.

    Requests of about equal lengths then have one split each and are not combined. Others are
    divided evenly, too, over fewer consumers.
    """
    each = -(-num_reqs // per_head)
    if max_query_len > 1 or num_reqs <= per_head or num_reqs % each:
        return per_head
    least_busy = _LEAST_BUSY_QUANTIZED if quantized else _LEAST_BUSY
    if num_reqs // each < least_busy * per_head:
        return per_head
    return num_reqs // each


def _columns(rows: int) -> int:
    """Columns of the matrix products: a wgmma has at least 8, and the kernel needs powers of 2."""
    return max(8, int(triton.next_power_of_2(rows)))


def _combines_in_kernel(
    num_reqs: int, num_kv_heads: int, rows: int, head_size_v: int, workers: int, num_counters: int
) -> bool:
    """Whether the attention kernel combines splits itself instead of a second kernel.

    It does so with about as many requests as workers (consumers of the grid) per head: most
    requests then have one or two splits, and a request split over all workers is combined in few
    rounds of loads. On an H200 this is up to 4% faster, while one request of 8k or 32k keys is 2
    to 3% faster with a combine kernel. 48 requests of 5k keys take 120.7 instead of 124.2 us with
    33 workers per head. The bound is the power of 2 up to the workers, so that a warm-up over
    powers of 2 compiles both variants.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: Hkv.
        rows: query heads of a group times tokens.
        head_size_v: Dv.
        workers: for each KV head.
        num_counters: counters given; one per worker is needed after those of the prefill.
    """
    rounds = workers / splits_per_load(_columns(rows), padded_width(head_size_v))
    enough = num_counters >= PREFILL_COUNTERS + workers * num_kv_heads
    return num_reqs >= 1 << (workers.bit_length() - 1) and rounds <= _MAX_LOAD_ROUNDS and enough


def hopper_decode_workspace_bytes(
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    max_query_len: int,
    head_size_v: int,
    max_resident_ctas: int,
    consumers: int = 1,
) -> int:
    """Workspace in bytes: two float32 partial results with LSEs per worker, and one header per
    token and KV head."""
    rows = group * max_query_len
    workers = workers_per_head(max_resident_ctas, num_kv_heads, consumers) * num_kv_heads
    return 4 * (2 * workers * rows * (head_size_v + 1) + num_tokens * num_kv_heads)


@dataclass(frozen=True, eq=False)
class HopperDecode:
    """The launches of one call signature of the Hopper decode, without addresses.

    Attributes:
        limits: the chip that tile and grid were chosen for.
        index: the device index.
        views: the key and value cache as TMA reads them.
        packed: whether they are the packed caches of vLLM's PagedAttention. Requests have one query
            token each then, and `query_start_loc` of a batch is not read.
        scale: softmax scale; times `k_scale` where the cache is not quantized.
        is_quantized: whether the cache has elements of 8 bits.
        numbers: the attention kernel's runtime numbers after its scale.
        score_sizes: sizes of the layer tensors of the score function.
        combine_tail: the combine kernel's runtime numbers.
        lse_offset, header_offset: in the workspace, in float32 elements, after the partial outputs.
        workspace_bytes: size of the workspace.
        attend: the attention kernel.
        combine: the combine kernel; None where the attention kernel combines.
        num_batch_tensors: number of batch tensors of the score function.
        last_strides: the kernel's last arguments. Strides of blocks, positions and heads, of the
            keys and of the values: those of the scales in the pages (M16), or of the caches in
            bytes where the kernel gathers their rows; else None. Other kernels have
            other strides or none.
        gathers: the kernel reads the caches by address instead of descriptors.
        reads_address: it takes the address of the keys after the descriptors.
    """

    limits: DeviceLimits
    index: int
    views: tuple[CacheView, CacheView] | tuple[PackedKeyView, PackedValueView]
    packed: bool
    scale: float
    is_quantized: bool
    score_sizes: tuple[int, ...]
    numbers: tuple[float | int, ...]
    combine_tail: tuple[int, ...]
    lse_offset: int
    header_offset: int
    workspace_bytes: int
    attend: BoundLaunch
    combine: BoundLaunch | None
    num_batch_tensors: int = 0
    last_strides: tuple[int | None, ...] = (None,) * 6
    gathers: bool = False
    reads_address: bool = False

    needs_alignment: ClassVar[bool] = True
    """TMA and 16-byte loads require aligned tensors, also for launches by Triton."""
    as_bytes: ClassVar[bool] = False

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.attend,) if self.combine is None else (self.attend, self.combine)

    @property
    def num_batch_values(self) -> int:
        """The number of values of a batch."""
        return _NUM_BATCH_VALUES + 3 * self.num_batch_tensors

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches of both kernels. The order of their arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
        """
        caches, maps = (KEY_CACHE, VALUE_CACHE), (KEY_MAP, VALUE_MAP)
        lookups: tuple[Lookup, ...] = ()
        sources: tuple[Any, ...] = caches
        if not self.gathers:
            sources = descriptor_arguments(self.views, maps, direct)
            if self.reads_address:
                sources = (*sources, KEY_CACHE)
            lookups = (
                Lookup(caches, self._descriptors, self._encode, maps)
                if direct
                else described(self.views, caches, maps),
            )
        starts, lens, table, outputs, lses, headers, counters = batch_sources(_NUM_BATCH_VALUES)
        pointers, sizes = score_arguments(
            self.score_sizes, self.num_batch_tensors, _NUM_BATCH_VALUES
        )
        layer_tensors = score_sources(len(self.score_sizes) // 2)
        scales = (K_SCALE, V_SCALE) if self.is_quantized else (None, None)
        arguments = (
            *sources, QUERY, OUT, LSE, SINKS, *scales,
            *layer_tensors, *pointers, starts, lens, table, outputs, lses, headers, counters,
            self.scale, *self.numbers, *sizes, *self.last_strides,
        )  # fmt: skip
        steps = [bind_step(self.attend, direct, aligned, arguments)]
        if self.combine is not None:
            arguments = (outputs, lses, headers, starts, SINKS, OUT, LSE, *self.combine_tail)
            steps.append(bind_step(self.combine, direct, aligned, arguments))
        return Launches(tuple(steps), lookups)

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch: without counters the combine kernel runs."""
        return batch

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its workspace is not aligned.
        `workspace` holds at least `workspace_bytes`."""
        starts, lens, table, _, _, space, counters = batch[:7]
        assert space is not None and table is not None
        outputs, score = space.data_ptr(), batch.score_tensors
        if outputs & ALIGNMENT:
            return None
        return (
            None if self.packed else starts.data_ptr(), lens.data_ptr(), table.data_ptr(), outputs,
            outputs + 4 * self.lse_offset, outputs + 4 * self.header_offset,
            None if counters is None or self.combine is not None else counters.data_ptr(),
            *(batch_score_values(score, True) if score else ()),
        )  # fmt: skip

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        partials = batch.workspace
        assert partials is not None
        if partials.dtype != torch.float32:
            partials = partials.view(torch.float32)
        lses, headers = partials[self.lse_offset :], partials[self.header_offset :]
        return (
            None if self.packed else batch.query_start_loc, batch.seq_lens, batch.block_table,
            partials, lses, headers.view(torch.int32),
            batch.counters if self.combine is None else None,
            *batch_score_values(batch.score_tensors, False),
        )  # fmt: skip

    @cached_property
    def _descriptors(self) -> LaunchCache:
        """Encoded descriptors of caches like this one; known once the kernel has been launched."""
        return encoded_descriptors(self.views, self.attend)

    def _encode(self, key: int, value: int) -> tuple[Any, ...]:
        """Encode and keep the descriptors of the caches at these addresses."""
        return encode_views(self._descriptors, self.attend, self.views, (key, value))


def prepare_hopper_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    tile: DecodeTile,
    limits: DeviceLimits,
    max_query_len: int,
    max_ctas: int | None = None,
    num_counters: int = 0,
) -> HopperDecode:
    """Prepare the launches of calls like this one with a given tile; at least one query and block.

    Args:
        key, value: `[B, N, Hkv, D]` and `[B, N, Hkv, Dv]`, or a packed cache
            `[B, Hkv, D / 8, N, 8]` and `[B, Hkv, D, N]`.
        max_ctas: CTAs that may run at a time; None means one per SM.
        num_counters: counters that calls pass.
    """
    num_tokens, num_heads, head_size = query.shape
    packed = key.dim() == 5
    if packed:
        num_blocks, num_kv_heads, head_size_v, block_size = value.shape
    else:
        num_blocks, block_size, num_kv_heads, head_size_v = value.shape
    stored = page_format(key, params.k_scale)
    if stored is not None:
        head_size_v = stored.head_size(head_size_v)
    assert batch.block_table is not None
    group = num_heads // num_kv_heads
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    box = box_keys(block_size, tile.block_n, "packed_keys" if packed else "nhd")
    views: tuple[CacheView, CacheView] | tuple[PackedKeyView, PackedValueView]
    views = CacheView.of(key, box, width), CacheView.of(value, box, width_v)
    if packed:
        views = PackedKeyView.of(key, box, width), PackedValueView.of(value, box, width_v)
    rows, (left, right) = group * max_query_len, params.window
    num_reqs = batch.seq_lens.shape[0]
    chunk, cap = params.attention_chunk_size, params.logits_soft_cap
    columns = _columns(rows)
    resident = max_ctas or limits.num_sms
    resident *= max(1, tile.warps)
    per_head = workers_per_head(resident, num_kv_heads, tile.consumers)
    workers = per_head * num_kv_heads
    in_kernel = not tile.warps and _combines_in_kernel(
        num_reqs, num_kv_heads, rows, head_size_v, per_head, num_counters
    )
    is_quantized, scale = key.dtype.itemsize == 1, params.scale
    if max_ctas is None and not tile.warps:
        whole = whole_requests(per_head, num_reqs, max_query_len, is_quantized) * num_kv_heads
        workers = whole if whole % tile.consumers == 0 else workers
    num_partials, stride_lt = 2 * workers * rows, 0 if lse is None else lse.stride(0)
    few = width_v * columns <= (_FEW_ELEMENTS // 2 if is_quantized else _FEW_ELEMENTS)
    few = few and key.dtype != torch.uint8  # four products and two accumulators
    gathered = gathers(block_size) and not packed
    # With 384 threads, `setmaxnreg` gives the consumers more.
    few = few or tile.consumers == 2 or gathered
    if not is_quantized:
        assert not isinstance(params.k_scale, Tensor)  # dispatch leaves tensors to the plain kernel
        scale *= float(params.k_scale)
    shared = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "DV": head_size_v,
        "HAS_SINK": params.sinks is not None, "HAS_LSE": lse is not None,
        "enable_fp_fusion": True, "launch_pdl": True,
    }  # fmt: skip
    kind = kv_kind(key.dtype, has_fp8=False)
    config = DecodeConfig(
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_size,
        DV=head_size_v,
        WIDTH=width,
        WIDTH_V=width_v,
        TILE_TOKENS=columns // group,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=block_size,
        ROWS=columns,
        STAGES=tile.stages,
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=chunk > 0,
        HAS_CAP=cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=lse is not None,
        KV_KIND=kind,
        K_SCALE_KIND=scale_kind("k_scale", params.k_scale),
        V_SCALE_KIND=scale_kind("v_scale", params.v_scale),
        PACKED=packed,
        COMBINE_IN_KERNEL=in_kernel,
        SPLITS_PER_LOAD=splits_per_load(columns, width_v),
        WORKERS=tile.consumers,
        EVEN_RANGES=in_kernel and kind == KV_PLAIN.value and columns >= max(16, 2 * group),
        QUERY_WARP=tile.consumers > 1 and tile.block_n <= 64 and kind != KV_INT4.value,
        GATHERS=gathered,
    )
    attend = {
        "CONFIG": config, **score_constants(params, "gluon"), "num_warps": 4,
        "maxnreg": _FEW_REGISTERS if few else _MANY_REGISTERS,
        "enable_fp_fusion": True, "launch_pdl": True,
    }  # fmt: skip
    kernel = hopper_decode_kernel
    if tile.warps:
        kernel = hopper_warp_decode_kernel
        attend = {
            "CONFIG": config, "num_warps": 1,
            "maxnreg": min(255, 65536 // (32 * tile.warps) // 8 * 8),
            "enable_fp_fusion": True, "launch_pdl": True,
        }  # fmt: skip
    combine = {
        **shared, "DV_PAD": triton.next_power_of_2(head_size_v),
        **combine_tile(num_tokens * num_heads, group, head_size_v),
    }  # fmt: skip
    combine_grid = (num_tokens, num_kv_heads, triton.cdiv(group, combine["HEADS"]))
    return HopperDecode(
        limits=limits,
        index=query.get_device(),
        views=views,
        packed=packed,
        scale=scale,
        is_quantized=is_quantized,
        score_sizes=tensor_sizes(params.layer_score_tensors()),
        num_batch_tensors=len(batch.score_tensors),
        last_strides=gathered_strides(key, value) if gathered else _scale_strides(params),
        gathers=gathered,
        numbers=(
            float(cap), unbounded(left), unbounded(right), unbounded(chunk),
            num_reqs, num_tokens, num_blocks, rows, query.stride(0), query.stride(1),
            out.stride(0), out.stride(1), stride_lt, batch.block_table.stride(0),
        ),
        combine_tail=(num_reqs, rows, out.stride(0), out.stride(1), stride_lt),
        lse_offset=num_partials * head_size_v,
        header_offset=num_partials * (head_size_v + 1),
        workspace_bytes=hopper_decode_workspace_bytes(
            num_tokens, num_kv_heads, group, max_query_len, head_size_v, resident, tile.consumers
        ),
        attend=BoundLaunch(kernel, (workers // max(1, tile.consumers), 1, 1), attend),
        combine=None if in_kernel else BoundLaunch(hopper_combine_kernel, combine_grid, combine),
    )  # fmt: skip


def _scale_strides(params: AttentionParams) -> tuple[int | None, ...]:
    """Strides of the scales of a page; see `HopperDecode.last_strides`."""
    if not params.scales_in_page:
        return (None,) * 6
    assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
    together = params.k_scale.shape[3]  # scales of a head, which are loaded at once
    strides = (*params.k_scale.stride()[:3], *params.v_scale.stride()[:3])
    return tuple(stride // together for stride in strides)


def launch_hopper_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    tile: DecodeTile,
    *,
    max_query_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor,
    counters: Tensor | None = None,
) -> None:
    """Run the kernel once with a given tile; arguments as in `paged_decode`.

    Raises:
        ContractError: tensors off 16-byte boundaries, or a workspace that is too small.
    """
    if query.numel() == 0:
        return
    batch = BatchTensors(
        query_start_loc, seq_lens, block_table, workspace=workspace, counters=counters,
        score_tensors=params.batch_score_tensors(),
    )  # fmt: skip
    prepared = prepare_hopper_decode(
        query, key_cache, value_cache, out, lse, batch, params, tile, limits_of(query),
        max_query_len, num_counters=0 if counters is None else counters.numel(),
    )  # fmt: skip
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    run_attention(prepared, call)
