"""Launch of the Hopper prefill. `limits.prefill_unsupported_reasons` says what it does not do, and `choice` asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile, choose_section, padded_width
from attnlib.ops.triton.hopper.descriptors import (
    Encoded,
    cache_descriptor,
    cache_facts,
    query_descriptor,
)
from attnlib.ops.triton.hopper.kernels.prefill import hopper_prefill_kernel
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.signature import Options, count_of

__all__ = ["HopperPrefill", "launch_hopper_prefill", "plan_hopper_prefill"]

_UNBOUNDED = 1 << 30


@dataclass
class HopperPrefill:
    """A call of the Hopper prefill less its addresses, scales and longest sequence: what the layers of one step share.

    Attributes:
        limits: the chip that it was worked out for.
        index: the device's number.
        tile: how a program works.
        num_kv_heads: Hkv.
        boxes: positions of a TMA box, and the padded widths of keys and values.
        query_box: tokens and heads of a box of queries; None where queries do not come by TMA.
        first_numbers, last_numbers: the kernel's runtime numbers between its scale and `beside`, and after its section.
        caches, queries: the TMA descriptors of caches and of queries of this shape.
        attend: the kernel.
    """

    limits: DeviceLimits
    index: int
    tile: HopperTile
    num_kv_heads: int
    boxes: tuple[int, int, int]
    query_box: tuple[int, int] | None
    first_numbers: tuple[float | int, ...]
    last_numbers: tuple[int, ...]
    caches: Encoded
    queries: Encoded
    attend: BoundLaunch

    def serve(
        self, query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, seq_lens: Tensor,
        options: Options, max_seq_len: int, counters: Tensor | None, beside: bool = False,
    ) -> bool:  # fmt: skip
        """Launch unless addresses or scales are beyond this kernel; whether it did.

        Args:
            counters: as in `paged_prefill`.
            beside: whether to start while the kernel launched before runs, which must let it (`release_successor`) and must
                have seen everything before itself end by then.
        """
        asked, keys, values, written = (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            options.out.data_ptr(),
        )
        if not self.accepts(query, key, value, options):
            return False
        if not self.tile.persistent:
            counters = None
        elif counters is None or count_of(counters) < PREFILL_COUNTERS:
            counters = torch.zeros(PREFILL_COUNTERS, dtype=torch.int32, device=query.device)
        addresses = asked | written | (0 if counters is None else counters.data_ptr())
        section, (_, width, width_v) = self.num_kv_heads, self.boxes
        if self.tile.sections:
            section = choose_section(section, max_seq_len, width + width_v)
        scale = options.scale * float(options.k_scale)
        rest = (query, options.out, options.lse, options.sinks, starts, seq_lens, block_table, counters, scale,
                *self.first_numbers, int(beside), section, *self.last_numbers)  # fmt: skip
        with device_guard(query):
            if self.attend.ready(addresses):
                maps = self.caches.find(self.attend, keys, values) or self._encode_caches(
                    key, value, keys, values
                )
                asks: tuple[Any, ...] = (None,)
                if self.query_box is not None:
                    asks = self.queries.find(self.attend, asked) or self._encode_query(query, asked)
                self.attend.go((*maps, *asks, *rest), self.index)
            else:
                self.attend(
                    (*self._cache_descriptors(key, value), self._query_descriptor(query), *rest),
                    addresses,
                    self.index,
                )
        return True

    def accepts(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
        """Whether `serve` would launch."""
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | options.out.data_ptr()
        return not addresses & 15 and bool(options.v_scale == 1.0)

    def _cache_descriptors(self, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        box, width, width_v = self.boxes
        return cache_descriptor(key, box, width), cache_descriptor(value, box, width_v)

    def _query_descriptor(self, query: Tensor) -> Any:
        return (
            None
            if self.query_box is None
            else query_descriptor(query, *self.query_box, self.boxes[1])
        )

    def _encode_caches(self, key: Tensor, value: Tensor, keys: int, values: int) -> tuple[Any, ...]:
        return self.caches.keep(self.attend, (keys, values), *self._cache_descriptors(key, value))

    def _encode_query(self, query: Tensor, asked: int) -> tuple[Any, ...]:
        return self.queries.keep(self.attend, (asked,), self._query_descriptor(query))


def plan_hopper_prefill(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, options: Options, tile: HopperTile,
    limits: DeviceLimits,
) -> HopperPrefill:  # fmt: skip
    """Work out the launch of calls like this one, with a given tile; there is at least one query and one block."""
    (num_tokens, num_heads, head_size), (num_blocks, block_size, num_kv_heads, _) = (
        query.shape,
        key.shape,
    )
    head_size_v, group = value.shape[3], num_heads // num_kv_heads
    width, width_v, box = (
        padded_width(head_size),
        padded_width(head_size_v),
        min(block_size, tile.block_n),
    )
    rows = 64 * tile.consumers
    tile_tokens, num_reqs, (left, right) = rows // group, starts.shape[0] - 1, options.window
    num_tiles, out, lse = num_tokens // tile_tokens + num_reqs + 1, options.out, options.lse
    items = num_tiles * num_kv_heads
    halves = (64 // group, group) if group <= 64 else (1, 64)
    load_query = tile_tokens * group == rows and (64 % group == 0 or group % 64 == 0)
    constants = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "D": head_size, "DV": head_size_v, "WIDTH": width, "WIDTH_V": width_v,
        "TILE_TOKENS": tile_tokens, "BLOCK_N": tile.block_n, "BLOCK_SIZE": block_size, "STAGES": tile.stages,
        "Q_STAGES": tile.q_stages, "CONSUMERS": tile.consumers, "LOAD_QUERY": load_query, "PERSISTENT": tile.persistent,
        "STAGED_STORE": tile.staged_store and width == width_v, "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers, "CAUSAL": bool(options.causal), "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0, "HAS_CHUNK": options.attention_chunk_size > 0, "HAS_CAP": options.logits_soft_cap > 0,
        "HAS_SINK": options.sinks is not None, "HAS_LSE": lse is not None, "num_warps": 4, "enable_fp_fusion": True,
        "launch_pdl": True,
    }  # fmt: skip
    return HopperPrefill(
        limits=limits,
        index=query.get_device(),
        tile=tile,
        num_kv_heads=num_kv_heads,
        boxes=(box, width, width_v),
        query_box=halves if load_query else None,
        first_numbers=(
            float(options.logits_soft_cap), min(left, _UNBOUNDED), min(right, _UNBOUNDED),
            min(options.attention_chunk_size, _UNBOUNDED), num_reqs, num_tokens, num_tiles,
        ),
        last_numbers=(
            num_blocks, query.stride(0), query.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
            block_table.stride(0),
        ),
        caches=Encoded(cache_facts(key, value, box, width, width_v), 0),
        queries=Encoded((query.dtype, tuple(query.shape), query.stride(), halves, width), 2),
        attend=BoundLaunch(hopper_prefill_kernel, (min(items, limits.num_sms) if tile.persistent else items, 1, 1), constants),
    )  # fmt: skip


def launch_hopper_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tile: HopperTile,
    *,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    attention_chunk_size: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    counters: Tensor | None = None,
) -> None:
    """Run the kernel once with a given tile; arguments as in `ops.triton.paged_prefill`."""
    if query.numel() == 0:
        return
    options = Options(
        scale,
        causal,
        window,
        attention_chunk_size,
        logits_soft_cap,
        None,
        sinks,
        None,
        1.0,
        1.0,
        out,
        lse,
    )
    batch = (query, key_cache, value_cache, block_table, query_start_loc)
    if not plan_hopper_prefill(*batch, options, tile, limits_of(query)).serve(
        *batch, seq_lens, options, max_seq_len, counters
    ):
        raise ValueError("the Hopper prefill wants query, caches and out on 16-byte boundaries")
