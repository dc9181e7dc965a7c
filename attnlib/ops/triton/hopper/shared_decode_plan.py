"""Host side of the Hopper decode of requests that share prefixes: tile, grid, workspace, arguments.

`support.shared_decode_unsupported_reasons` lists what the kernel does not implement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    described,
    descriptor_arguments,
    encode_views,
    encoded_descriptors,
)
from attnlib.ops.triton.hopper.kernels.cache_tiles import box_keys
from attnlib.ops.triton.hopper.kernels.merge_rows import hopper_merge_rows_kernel
from attnlib.ops.triton.hopper.kernels.shared_decode import (
    SharedDecodeConfig,
    hopper_shared_decode_kernel,
)
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    BoundLaunch,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.cache import LaunchCache
from attnlib.ops.triton.launch.run import is_direct
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    KEY_MAP,
    LSE,
    OUT,
    QUERY,
    SINKS,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Lookup,
    batch_sources,
    bind_step,
)

__all__ = [
    "HopperSharedDecode", "prepare_shared_decode", "shared_decode_ranges", "shared_decode_tile",
]  # fmt: skip

_REGISTERS = 168
"""Registers per thread of 384 threads; `setmaxnreg` gives the consumers more. An SM holds one CTA,
which the schedule relies on."""

_FEW_ROWS = 1024
"""Rows (tokens times query heads) up to which a CTA of the merge has 8 warps instead of 4, one for
each row, and reads 16 partial results of a row at a time instead of 8."""


def shared_decode_tile(head_size: int, head_size_v: int) -> DecodeTile:
    """Keys per step and depth of the rings, for head sizes of `support`.

    With heads of 128, three stages of 64 keys were faster than four on an H200, and those than two
    of 128 keys (docs/kernel-notes.md); smaller heads were not compared.
    """
    if max(padded_width(head_size), padded_width(head_size_v)) <= 64:
        return DecodeTile(128, 4, 2)
    return DecodeTile(64, 3, 2)


def shared_decode_ranges(num_kv_heads: int, num_sms: int) -> int:
    """Ranges of tiles: one CTA for each range and KV head is resident."""
    return max(1, num_sms // num_kv_heads)


@dataclass(frozen=True, eq=False)
class HopperSharedDecode:
    """The launches of one call signature, without addresses.

    Attributes:
        limits: the chip that the grid was chosen for.
        index: the device index.
        views: the key and value cache as TMA reads them.
        scale: softmax scale times that of the keys.
        soft_cap: 0 is none.
        numbers: B, query tokens, strides of query tokens and heads and of rows of the block table.
        merge_strides: of output tokens and heads, and of the tokens of the LSE.
        num_heads, head_size_v: Hq and Dv.
        attend: the attention kernel.
        merge: the kernel that merges partial results.
    """

    limits: DeviceLimits
    index: int
    views: tuple[CacheView, CacheView]
    scale: float
    soft_cap: float
    numbers: tuple[int, ...]
    merge_strides: tuple[int, int, int]
    num_heads: int
    head_size_v: int
    attend: BoundLaunch
    merge: BoundLaunch

    def launches(self, direct: bool) -> Launches:
        """The launches of both kernels. The order of their arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
        """
        caches, maps = (KEY_CACHE, VALUE_CACHE), (KEY_MAP, VALUE_MAP)
        lookup = described(self.views, caches, maps)
        if direct:
            lookup = Lookup(caches, self._descriptors, self._encode, maps)
        (
            ranges, segments, items, tokens, starts, rows, num_tokens, table, outputs, lses,
        ) = batch_sources(10)  # fmt: skip
        attend = (
            *descriptor_arguments(self.views, maps, direct), QUERY, ranges, segments, items,
            tokens, table, outputs, lses, self.scale, self.soft_cap, *self.numbers,
        )  # fmt: skip
        merge = outputs, lses, starts, rows, SINKS, OUT, LSE, num_tokens, *self.merge_strides
        return Launches(
            (
                bind_step(self.attend, direct, True, attend),
                bind_step(self.merge, direct, True, merge),
            ),
            (lookup,),
        )

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    @cached_property
    def _descriptors(self) -> LaunchCache:
        return encoded_descriptors(self.views, self.attend)

    def _encode(self, key: int, value: int) -> tuple[object, ...]:
        return encode_views(self._descriptors, self.attend, self.views, (key, value))

    def workspace(self, items: DecodeItems, device: torch.device) -> Tensor:
        """Memory of the partial results of a batch."""
        elements = items.num_partials * self.num_heads * (self.head_size_v + 1)
        return torch.empty(elements, dtype=torch.float32, device=device)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        items: DecodeItems,
        params: AttentionParams,
        out: Tensor,
        lse: Tensor | None,
        workspace: Tensor,
    ) -> bool:
        """Launch on the current stream; False, and no launch, where an address is not a multiple of
        16. Arguments as in `ops.torch.shared_decode`; `workspace` as from the method."""
        pointers = tuple(tensor.data_ptr() for tensor in (query, key, value, out))
        lses = items.num_partials * self.num_heads * self.head_size_v
        addresses = workspace.data_ptr()
        for pointer in pointers:
            addresses |= pointer
        if addresses & ALIGNMENT:
            return False
        integers = (
            items.ranges, items.segments, items.items, items.tokens, items.partial_starts,
            items.partial_rows,
        )  # fmt: skip
        with device_guard(query):
            if is_direct((self.attend, self.merge)) and not launches_observed():
                space = workspace.data_ptr()
                self.direct.run(
                    current_stream(self.index),
                    (
                        *pointers, None if lse is None else lse.data_ptr(), None, None, None,
                        None if params.sinks is None else params.sinks.data_ptr(), None, None,
                    ),
                    (
                        *(tensor.data_ptr() for tensor in integers), items.num_tokens,
                        table.data_ptr(), space, space + 4 * lses,
                    ),
                )  # fmt: skip
            else:
                self.launches(False).run(
                    0,
                    (query, key, value, out, lse, None, None, None, params.sinks, None, None),
                    (*integers, items.num_tokens, table, workspace, workspace[lses:]),
                )
        return True


def prepare_shared_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    params: AttentionParams,
    limits: DeviceLimits,
    tile: DecodeTile,
    num_ranges: int,
) -> HopperSharedDecode:
    """Prepare the launches of calls like this one; arguments as in `ops.torch.shared_decode`."""
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, head_size_v = value.shape
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    box, cap = box_keys(block_size, tile.block_n, "nhd"), params.logits_soft_cap
    assert not isinstance(params.k_scale, Tensor)  # the cache is not quantized
    config = SharedDecodeConfig(
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_size,
        DV=head_size_v,
        WIDTH=width,
        WIDTH_V=width_v,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=block_size,
        STAGES=tile.stages,
        HAS_CAP=cap > 0,
    )
    attend = {
        "CONFIG": config, "num_warps": 4, "maxnreg": _REGISTERS, "enable_fp_fusion": True,
        "launch_pdl": True,
    }  # fmt: skip
    few = num_tokens * num_heads <= _FEW_ROWS
    warps, step = (8, 16) if few else (4, 8)
    width_merged = max(16, triton.next_power_of_2(head_size_v))
    rows = warps * (32 // min(32, width_merged // 4))
    merge = {
        "NUM_HEADS": num_heads, "HEADS": warps, "DV": head_size_v, "DV_PAD": width_merged,
        "STEP": step, "HAS_SINK": params.sinks is not None, "HAS_LSE": lse is not None,
        "num_warps": warps, "enable_fp_fusion": True, "launch_pdl": True,
    }  # fmt: skip
    grid = (num_tokens, -(-num_heads // rows), 1)
    return HopperSharedDecode(
        limits=limits,
        index=query.get_device(),
        views=(CacheView.of(key, box, width), CacheView.of(value, box, width_v)),
        scale=params.scale * float(params.k_scale),
        soft_cap=float(cap),
        numbers=(num_blocks, num_tokens, query.stride(0), query.stride(1), table.stride(0)),
        merge_strides=(out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)),
        num_heads=num_heads,
        head_size_v=head_size_v,
        attend=BoundLaunch(hopper_shared_decode_kernel, (num_ranges * num_kv_heads, 1, 1), attend),
        merge=BoundLaunch(hopper_merge_rows_kernel, grid, merge),
    )
