"""The Hopper prefill over 16-bit copies of keys and values: of quantized caches and small blocks.

The prefill kernel for float8 pages (`kernels/converter.py`) converts each tile of keys again for
every 128 query rows, and that for blocks of 1 to 4 tokens (`kernels/gather.py`) gathers it again.
Pages with scales have only a portable one. Long prompts read the same tiles many times, so that one
pass over the whole context before the prefill takes less time. The copies are packed rows without
pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from attnlib.kv_dtype import page_format
from attnlib.ops.checks import vector_elements
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.batch_tensors import LENGTH_STEP, BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile
from attnlib.ops.triton.hopper.descriptors import (
    TransposedView,
    encode_views,
    encoded_descriptors,
)
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill, prepare_hopper_prefill
from attnlib.ops.triton.hopper.sizes import COPIED_BYTES, COPIED_GROUP, COPIED_TOKENS
from attnlib.ops.triton.kernels.convert_cache import NO_SCALES, convert_cache_kernel
from attnlib.ops.triton.kernels.float8_copy import float8_copy_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY_CACHE,
    V_SCALE,
    VALUE_CACHE,
    Launches,
    Source,
    batch_sources,
    bind_step,
)
from attnlib.ops.triton.quantized_pages import page_kind, page_words

__all__ = [
    "FLOAT8_TILE", "ConvertedPrefill", "copied_rows", "copied_sizes", "multiplies_float8",
    "prepare_converted_prefill", "prepare_float8_prefill",
]  # fmt: skip

_TOKENS = 32
"""Tokens of a tile of the conversion."""

_PROGRAMS_PER_SM = 8

FLOAT8_TILE = HopperTile(
    128, 4, persistent=True, q_stages=2, consumers=3, consumer_registers=160, producer_registers=32
)


def copied_rows(
    key: Tensor,
    sizes: tuple[int, int],
    batch: BatchTensors,
    params: AttentionParams,
    max_query_len: int,
    group: int,
) -> int:
    """Rows of the copies for batches like this one; 0 where the prefill reads the pages.

    Args:
        key: the key cache.
        sizes: head sizes of keys and values.
        max_query_len: query tokens of the longest request.
        group: query heads per KV head.
    """
    if max_query_len < COPIED_TOKENS or group < COPIED_GROUP or batch.max_seq_len <= 0:
        return 0
    if params.score_function is not None:
        return 0
    longest = batch.length_class(key) * LENGTH_STEP
    count = batch.seq_lens.shape[0] * longest
    return count if 2 * count * key.shape[2] * sum(sizes) <= COPIED_BYTES else 0


def multiplies_float8(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> bool:
    """Whether prefills over copies have float8 products (M19)."""
    group = query.shape[1] // key.shape[2]
    return (
        params.allow_fp8_queries
        and key.dtype == torch.float8_e4m3fn
        and key.shape[3] == value.shape[3] == 128
        and 64 % group == 0
        and params.sinks is None
        and params.logits_soft_cap == 0
    )


@dataclass(frozen=True, eq=False)
class ConvertedPrefill:
    """The launches of one call signature, without addresses.

    Attributes:
        prefill: the prefill over the copies.
        convert: the conversion.
        scales: which scales the conversion takes from a call: those in the pages, or none.
        numbers: the runtime numbers of the conversion.
        rows: rows of the copies.
        dtype: of the copies.
        sizes: elements of the copies of the keys and of the values.
    """

    prefill: HopperPrefill
    convert: BoundLaunch
    scales: tuple[Source | None, Source | None]
    numbers: tuple[int | None, ...]
    rows: int
    dtype: torch.dtype
    sizes: tuple[int, int]

    needs_alignment: ClassVar[bool] = True
    as_bytes: ClassVar[bool] = False
    workspace_bytes: ClassVar[int] = 0

    @property
    def limits(self) -> DeviceLimits:
        """The chip that tile and grid were chosen for."""
        return self.prefill.limits

    @property
    def index(self) -> int:
        """The device index."""
        return self.prefill.index

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.convert, *self.prefill.kernels)

    @property
    def num_batch_values(self) -> int:
        """The number of values of a batch: those of the prefill, then those of the conversion."""
        return self.prefill.num_batch_values + 7

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches. The order of the arguments of the conversion is written here."""
        keys, values, starts, lens, table, *maps = batch_sources(7, self.prefill.num_batch_values)
        found = self.prefill.launches(direct, aligned, maps=(maps[0], maps[1]))
        arguments = (
            KEY_CACHE, VALUE_CACHE, *self.scales, keys, values, starts, lens, table, *self.numbers,
        )  # fmt: skip
        return found._replace(
            steps=(bind_step(self.convert, direct, aligned, arguments), *found.steps)
        )

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch with memory for the copies, and with counters if it has none."""
        starts = batch.query_start_loc.shape[0]
        space = torch.empty(
            sum(self.sizes) + 4 // self.dtype.itemsize * starts,
            dtype=self.dtype,
            device=batch.query_start_loc.device,
        )
        return self.prefill.with_scratch(batch._replace(workspace=space))

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its counters are not aligned. Before
        the first launch by Triton they lack the descriptors."""
        packed, (keys, values, starts) = self._packed(batch)
        found = self.prefill.addresses(packed)
        if found is None:
            return None
        assert batch.block_table is not None
        attend, views = self.prefill.attend, self.prefill.views
        copies = keys.data_ptr(), values.data_ptr()
        maps: tuple[Any, ...] = (None, None)
        if attend.encode is not None:  # known once the kernel has been launched by Triton
            encoded = encoded_descriptors(views, attend)
            maps = encoded.get(copies) or encode_views(encoded, attend, views, copies)
        return (
            *found, *copies, starts.data_ptr(), batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(), *maps,
        )  # fmt: skip

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        packed, (keys, values, starts) = self._packed(batch)
        maps = (
            view.describe(copy.data_ptr())
            for view, copy in zip(self.prefill.views, (keys, values), strict=True)
        )
        return (
            *self.prefill.tensors(packed), keys, values, starts, batch.seq_lens, batch.block_table,
            *maps,
        )  # fmt: skip

    def _packed(self, batch: BatchTensors) -> tuple[BatchTensors, tuple[Tensor, Tensor, Tensor]]:
        """The batch of the prefill over the copies; the copies and the first rows of the requests.

        The latter take the place of a block table.
        """
        space = batch.workspace
        assert space is not None  # see `with_scratch`
        num_keys, end = self.sizes[0], sum(self.sizes)
        keys, values, starts = space[:num_keys], space[num_keys:end], space[end:].view(torch.int32)
        packed = batch._replace(seq_lens=starts, block_table=starts.unsqueeze(1))
        return packed, (keys, values, starts)


def prepare_converted_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    tile: HopperTile,
    limits: DeviceLimits,
    rows: int,
) -> ConvertedPrefill:
    """Prepare the launches of calls like this one.

    Args:
        tile: of a prefill over 16-bit keys.
        rows: as `copied_rows` returns.
    """
    block_size, num_kv_heads = key.shape[1:3]
    num_reqs, stored = batch.seq_lens.shape[0], page_format(key, params.k_scale)
    sizes = key.shape[3], value.shape[3]
    scales: tuple[Source | None, Source | None] = (None, None)
    strides: tuple[int | None, ...] = (None,) * 6
    words = [(0, 0), (0, 0)]
    format_ = {"KIND": int(NO_SCALES.value), "PTX": 0}
    if stored is not None:
        assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
        sizes, scales = copied_sizes(key, value, params), (K_SCALE, V_SCALE)
        ptx = 0 if stored.elements_per_group else 89
        format_ = {"KIND": page_kind(stored), "PTX": ptx}
        sides = (key, params.k_scale), (value, params.v_scale)
        words = [page_words(view, scale, stored) for view, scale in sides]
        strides = (*params.k_scale.stride()[:3], *params.v_scale.stride()[:3])
        params = replace(params, k_scale=1.0, v_scale=1.0)
    keys, values = (
        torch.empty(1, rows, num_kv_heads, size, dtype=query.dtype, device="meta") for size in sizes
    )
    table = torch.empty(num_reqs + 1, 1, dtype=torch.int32, device="meta")
    prefill = prepare_hopper_prefill(
        query, keys, values, out, lse, batch._replace(block_table=table), params, tile, limits,
        unpaged=True,
    )  # fmt: skip
    assert batch.block_table is not None
    convert = BoundLaunch(
        convert_cache_kernel,
        (_PROGRAMS_PER_SM * limits.num_sms, 1, 1),
        {
            "NUM_KV_HEADS": num_kv_heads, "D": sizes[0], "DV": sizes[1],
            "D_PAD": triton.next_power_of_2(sizes[0]), "DV_PAD": triton.next_power_of_2(sizes[1]),
            "WORDS": words[0][0], "WORDS_PAD": words[0][1], "DV_WORDS": words[1][0],
            "DV_WORDS_PAD": words[1][1], "BLOCK_SIZE": block_size, **format_, "TOKENS": _TOKENS,
            "VEC_K": vector_elements("key_cache", key),
            "VEC_V": vector_elements("value_cache", value), "num_warps": 4,
        },
    )  # fmt: skip
    numbers = (num_reqs, rows, batch.block_table.stride(0))
    return ConvertedPrefill(
        prefill,
        convert,
        scales,
        (*numbers, *key.stride()[:3], *value.stride()[:3], *strides),
        rows,
        query.dtype,
        (rows * num_kv_heads * sizes[0], rows * num_kv_heads * sizes[1]),
    )


def prepare_float8_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    rows: int,
) -> ConvertedPrefill:
    """Prepare the launches of calls like this one with float8 queries and products
    (`kernels/float8_prefill.py`), over a cache of e4m3 elements.

    Args:
        rows: as `copied_rows` returns.
    """
    block_size, num_kv_heads, head_size = key.shape[1:]
    num_reqs, head_size_v, tile = batch.seq_lens.shape[0], value.shape[3], FLOAT8_TILE
    keys, values = (
        torch.empty(1, rows, num_kv_heads, size, dtype=key.dtype, device="meta")
        for size in (head_size, head_size_v)
    )
    # As in `kernels/float8_copy.py`.
    columns = (rows + 144 * num_reqs + 143) // 16 * 16
    lines = num_kv_heads * head_size_v
    table = torch.empty(num_reqs + 1, 1, dtype=torch.int32, device="meta")
    prefill = prepare_hopper_prefill(
        query, keys, values, out, lse, batch._replace(block_table=table), params, tile, limits,
        unpaged=True,
        transposed=TransposedView((lines, columns), (head_size_v, tile.block_n)),
    )  # fmt: skip
    assert batch.block_table is not None
    copy = BoundLaunch(
        float8_copy_kernel,
        (4 * limits.num_sms, 1, 1),
        {
            "NUM_KV_HEADS": num_kv_heads, "D": head_size, "DV": head_size_v,
            "BLOCK_SIZE": block_size, "TOKENS": tile.block_n,
            "VEC_K": vector_elements("key_cache", key),
            "VEC_V": vector_elements("value_cache", value), "num_warps": 4,
        },
    )  # fmt: skip
    numbers = (num_reqs, rows, batch.block_table.stride(0))
    return ConvertedPrefill(
        prefill,
        copy,
        (None, None),
        (*numbers, *key.stride()[:3], *value.stride()[:3], *((None,) * 6)),
        rows,
        key.dtype,
        (rows * num_kv_heads * head_size, lines * columns),
    )


def copied_sizes(key: Tensor, value: Tensor, params: AttentionParams) -> tuple[int, int]:
    """The head sizes of keys and values in pages with scales."""
    stored = page_format(key, params.k_scale)
    assert stored is not None  # the caller has checked that pages hold scales
    return stored.head_size(key.shape[3]), stored.head_size(value.shape[3])
