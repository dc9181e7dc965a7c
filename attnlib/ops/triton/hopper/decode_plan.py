"""Launch of the Hopper decode. `limits.decode_unsupported_reasons` says what it does not do, and `choice` asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.hopper_tiles import DecodeTile, padded_width
from attnlib.ops.triton.heuristics.splits import splits_per_load
from attnlib.ops.triton.hopper.descriptors import Encoded, cache_descriptor, cache_facts
from attnlib.ops.triton.hopper.kernels.combine import hopper_combine_kernel
from attnlib.ops.triton.hopper.kernels.decode import hopper_decode_kernel
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.signature import Options

__all__ = [
    "HopperDecode",
    "hopper_decode_workspace_bytes",
    "launch_hopper_decode",
    "plan_hopper_decode",
]

_MOST_PARTS = 255
_UNBOUNDED = 1 << 30


_FEW_ROWS = 1024
"""Rows (tokens times query heads) up to which each has a program of its own in the join: quickest for a few, while of
many most have nothing to merge and cost a program each."""


_FEW_REGISTERS, _MANY_REGISTERS = 168, 240
"""Registers of a thread, of which a CTA has 256 (two of its warps idle): more than half of a multiprocessor's 65536, so that
it holds one CTA, however small the tile. An experiment in which a CTA waited for its predecessor beside a CTA of that
predecessor ended in illegal addresses (benchmarks/results/h200/limits.txt, 4)."""

_MOST_ROUNDS = 8
"""Rounds of loads, each about a microsecond, that the merging of one request's pieces may take."""


def _join_tile(num_rows: int, group: int, head_size_v: int) -> dict[str, int]:
    """How the join works: heads of a program, pieces that it loads together, and its warps."""
    if num_rows <= _FEW_ROWS:
        return {"HEADS": 1, "STEP": 32 if head_size_v <= 128 else 16, "num_warps": 1}
    return {"HEADS": min(4, triton.next_power_of_2(group)), "STEP": 8, "num_warps": 4}


def _parts(slots: int, num_kv_heads: int) -> int:
    """Parts of one CTA for each KV head: as many as the chip holds at a time."""
    return min(max(1, slots // num_kv_heads), _MOST_PARTS)


def _columns(rows: int) -> int:
    """Columns of the products: an asynchronous one has 8 at least, and the kernel powers of two."""
    return max(8, int(triton.next_power_of_2(rows)))


def _joins_itself(
    num_reqs: int, num_kv_heads: int, rows: int, head_size_v: int, num_sms: int, num_counters: int
) -> bool:
    """Whether the decode merges pieces itself: where there are as many requests as parts, so that most come in one piece or
    two, and one that comes in all of them is merged in few rounds of loads.

    On an H200 it is then up to 4% quicker; one request of 8k or 32k is 2 to 3% quicker with a kernel of its own for that
    (benchmarks/results/h200/tiles.txt, 10). The bound is a power of 2, so that a warm-up by powers meets both ways.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: Hkv.
        rows: query heads of a group times tokens.
        head_size_v: Dv.
        num_sms: multiprocessors of the chip.
        num_counters: how many there are (`hopper.counters`); it needs one for each CTA, after those of the prefill.
    """
    parts = _parts(num_sms, num_kv_heads)
    rounds = parts / splits_per_load(_columns(rows), padded_width(head_size_v))
    return (
        num_reqs >= triton.next_power_of_2(parts)
        and rounds <= _MOST_ROUNDS
        and num_counters >= PREFILL_COUNTERS + parts * num_kv_heads
    )


def hopper_decode_workspace_bytes(
    num_tokens: int, num_kv_heads: int, group: int, max_query_len: int, head_size_v: int, slots: int
) -> int:
    """Bytes beside the output: two float32 pieces with their LSEs for each CTA, and a note for each token and KV head."""
    rows = group * max_query_len
    return 4 * (
        2 * _parts(slots, num_kv_heads) * num_kv_heads * rows * (head_size_v + 1)
        + num_tokens * num_kv_heads
    )


@dataclass
class HopperDecode:
    """A call of the Hopper decode less its addresses and scales: what the layers of one step share.

    Attributes:
        limits: the chip that it was worked out for.
        index: the device's number.
        boxes: positions of a TMA box, and the padded widths of keys and values.
        numbers: the attention kernel's runtime numbers after its scale.
        join_numbers: those of the kernel that joins pieces.
        lses, pieces: where those lie in the workspace, in float32 elements; partial outputs come first.
        num_bytes: what the workspace has to hold.
        encoded: the TMA descriptors of caches of this shape.
        attend: the attention kernel.
        join: the one that merges pieces after it; None where the first one does.
    """

    limits: DeviceLimits
    index: int
    boxes: tuple[int, int, int]
    numbers: tuple[float | int, ...]
    join_numbers: tuple[int, ...]
    lses: int
    pieces: int
    num_bytes: int
    encoded: Encoded
    attend: BoundLaunch
    join: BoundLaunch | None

    def serve(
        self, query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, seq_lens: Tensor,
        options: Options, workspace: Tensor | None, counters: Tensor | None = None, beside: Callable[[], object] | None = None,
    ) -> bool:  # fmt: skip
        """Launch unless addresses, scales or the workspace are beyond this kernel; whether it did.

        Args:
            workspace: as in `paged_decode`.
            counters: likewise; wanted where this was planned with them.
            beside: launches what runs on the multiprocessors that this call leaves free, between its two kernels; the
                second waits for it. Not for calls that were planned with counters.
        """
        out = options.out
        asked, keys, values, written = (
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
        )
        if (asked | keys | values | written) & 15 or options.v_scale != 1.0:
            return False
        if workspace is None:
            workspace = torch.empty(self.num_bytes // 4, dtype=torch.float32, device=query.device)
        elif workspace.nbytes < self.num_bytes:
            return False
        counters = counters if self.join is None else None
        partials, scale = workspace.data_ptr(), options.scale * float(options.k_scale)
        written |= partials
        with device_guard(query):
            if self.attend.ready(asked | written) and (
                self.join is None or self.join.ready(written)
            ):
                maps = self.encoded.find(self.attend, keys, values) or self._encode(
                    key, value, keys, values
                )
                lses, pieces = partials + 4 * self.lses, partials + 4 * self.pieces
                self.attend.go((*maps, query, out, options.lse, options.sinks, starts, seq_lens, block_table, partials, lses,
                                pieces, counters, scale, *self.numbers), self.index)  # fmt: skip
                if beside is not None:
                    beside()
                if self.join is not None:
                    self.join.go(
                        (
                            partials,
                            lses,
                            pieces,
                            starts,
                            options.sinks,
                            out,
                            options.lse,
                            *self.join_numbers,
                        ),
                        self.index,
                    )
            else:
                self._by_triton(
                    query,
                    key,
                    value,
                    block_table,
                    starts,
                    seq_lens,
                    options,
                    workspace,
                    counters,
                    scale,
                    asked | written,
                    beside,
                )
        return True

    def _descriptors(self, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        box, width, width_v = self.boxes
        return cache_descriptor(key, box, width), cache_descriptor(value, box, width_v)

    def _encode(self, key: Tensor, value: Tensor, keys: int, values: int) -> tuple[Any, ...]:
        return self.encoded.keep(self.attend, (keys, values), *self._descriptors(key, value))

    def _by_triton(
        self, query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, seq_lens: Tensor,
        options: Options, workspace: Tensor, counters: Tensor | None, scale: float, addresses: int, beside: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        """The launches with Triton's own arguments, where the encoded ones may not be used (yet)."""
        partials = workspace if workspace.dtype == torch.float32 else workspace.view(torch.float32)
        lses, pieces = partials[self.lses :], partials[self.pieces :].view(torch.int32)
        out, lse, sinks = options.out, options.lse, options.sinks
        attend = (
            *self._descriptors(key, value),
            query,
            out,
            lse,
            sinks,
            starts,
            seq_lens,
            block_table,
            partials,
            lses,
            pieces,
            counters,
            scale,
        )
        self.attend((*attend, *self.numbers), addresses, self.index)
        if beside is not None:
            beside()
        written = out.data_ptr() | partials.data_ptr()
        if self.join is not None:
            self.join(
                (partials, lses, pieces, starts, sinks, out, lse, *self.join_numbers),
                written,
                self.index,
            )


def plan_hopper_decode(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, starts: Tensor, options: Options, tile: DecodeTile,
    limits: DeviceLimits, max_query_len: int, slots: int | None = None,
    num_counters: int = 0,
) -> HopperDecode:  # fmt: skip
    """Work out the launches of calls like this one, with a given tile; there is at least one query and one block.
    `slots` is how many programs may run at a time, None as many as the chip holds; `num_counters` how many counters calls bring."""
    (num_tokens, num_heads, head_size), (_, block_size, num_kv_heads, _) = query.shape, key.shape
    head_size_v, group = value.shape[3], num_heads // num_kv_heads
    width, width_v, box = (
        padded_width(head_size),
        padded_width(head_size_v),
        min(block_size, tile.block_n),
    )
    rows, num_reqs, (left, right) = group * max_query_len, starts.shape[0] - 1, options.window
    columns = _columns(rows)
    slots, out, lse = slots or limits.num_sms, options.out, options.lse
    programs = _parts(slots, num_kv_heads) * num_kv_heads
    joins = _joins_itself(num_reqs, num_kv_heads, rows, head_size_v, slots, num_counters)
    places, stride_lt = 2 * programs * rows, 0 if lse is None else lse.stride(0)
    shared = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "DV": head_size_v, "HAS_SINK": options.sinks is not None,
        "HAS_LSE": lse is not None, "enable_fp_fusion": True, "launch_pdl": True,
    }  # fmt: skip
    attend = {
        **shared, "D": head_size, "WIDTH": width, "WIDTH_V": width_v, "TILE_TOKENS": columns // group,
        "BLOCK_N": tile.block_n, "BLOCK_SIZE": block_size, "ROWS": columns, "STAGES": tile.stages,
        "COMBINE_IN_KERNEL": joins, "SPLITS_PER_LOAD": splits_per_load(columns, width_v), "CAUSAL": bool(options.causal),
        "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "HAS_CHUNK": options.attention_chunk_size > 0,
        "HAS_CAP": options.logits_soft_cap > 0, "num_warps": 4, "maxnreg": _FEW_REGISTERS if width_v * columns <= 128 * 32 else _MANY_REGISTERS,
    }  # fmt: skip
    join = {
        **shared,
        "DV_PAD": triton.next_power_of_2(head_size_v),
        **_join_tile(num_tokens * num_heads, group, head_size_v),
    }
    return HopperDecode(
        limits=limits,
        index=query.get_device(),
        boxes=(box, width, width_v),
        numbers=(
            float(options.logits_soft_cap), min(left, _UNBOUNDED), min(right, _UNBOUNDED), min(options.attention_chunk_size, _UNBOUNDED),
            num_reqs, num_tokens, key.shape[0], rows, query.stride(0), query.stride(1), out.stride(0), out.stride(1), stride_lt,
            block_table.stride(0),
        ),
        join_numbers=(num_reqs, rows, out.stride(0), out.stride(1), stride_lt),
        lses=places * head_size_v,
        pieces=places * (head_size_v + 1),
        num_bytes=hopper_decode_workspace_bytes(num_tokens, num_kv_heads, group, max_query_len, head_size_v, slots),
        encoded=Encoded(cache_facts(key, value, box, width, width_v), 0),
        attend=BoundLaunch(hopper_decode_kernel, (programs, 1, 1), attend),
        join=None if joins else BoundLaunch(hopper_combine_kernel, (num_tokens, num_kv_heads, triton.cdiv(group, join["HEADS"])), join),
    )  # fmt: skip


def launch_hopper_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tile: DecodeTile,
    *,
    max_query_len: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    attention_chunk_size: int,
    logits_soft_cap: float,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    counters: Tensor | None = None,
) -> None:
    """Run the kernel once with a given tile; arguments as in `paged_decode`, `workspace` contiguous and large enough."""
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
    num_counters = 0 if counters is None else counters.numel()
    launch = plan_hopper_decode(
        *batch, options, tile, limits_of(query), max_query_len, num_counters=num_counters
    )
    if not launch.serve(*batch, seq_lens, options, workspace, counters):
        raise ValueError(
            "the Hopper decode wants tensors on 16-byte boundaries and a workspace of hopper_decode_workspace_bytes"
        )
