"""Host side of the Hopper kernel over two key streams: support, grid and constants."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.entry_stream import EntryStream
from attnlib.ops.triton.heuristics.splits import MAX_SPLITS
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.kernels.stream_work import StreamConfig
from attnlib.ops.triton.hopper.kernels.streams import hopper_streams_kernel
from attnlib.ops.triton.hopper.sizes import latent_head_blocks
from attnlib.ops.triton.hopper.streams_support import streams_unsupported_reasons
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch

__all__ = ["HopperStreams", "streams_reasons"]

_TILE = 64
"""Latents of a tile."""
_STEP = 2 * _TILE
"""Slots that a CTA visits at least."""
_REGISTERS = 216
"""Of a thread of the warps that multiply."""
_EARLY_WAVES = 8
"""Waves of CTAs up to which queries and lists are read before the request of a token is known. On
an H200, with a combine kernel that starts early: decodes of 32 requests 0.87 to 0.92 of the time of
an earlier run without, prefills of 2048 tokens 1.05 and 1.06."""


def streams_reasons(call: AttentionCall, entries: EntryStream) -> list[str]:
    """Return why the kernel does not serve a call; empty if it does.

    Args:
        call: over the own keys, with the mask of the layer.
        entries: the second stream.
    """
    query, key, out, params = call.query, call.key, call.out, call.params
    second = entries.key_cache
    features, tables = CallFeatures.of(params), (entries.block_table, entries.num_entries)
    scales = (params.k_scale, params.v_scale, entries.k_scale, entries.v_scale)
    reasons = streams_unsupported_reasons(
        *(call.shape, features, call.limits, params.window, params.attention_chunk_size),
        *(entries.names_single_entries, params.causal is True),
    )
    if not values_are_prefix(key, call.value) or not values_are_prefix(second, entries.value_cache):
        reasons.append("values that are not the keys")
    if any(stride % 8 for t in (query, key, second, out) for stride in t.stride()[:2]) or any(
        t.stride(-1) != 1 for t in (query, key, second, out)
    ):
        reasons.append("rows that do not begin at multiples of 16 bytes")
    if any(t.dtype != torch.int32 or t.stride(-1) != 1 for t in tables):
        reasons.append("tables of entries that are not int32 with dense rows")
    if (call.addresses | second.data_ptr()) & ALIGNMENT:
        reasons.append("tensors that do not begin at multiples of 16 bytes")
    if {out.dtype, key.dtype, second.dtype} != {query.dtype} or not key.shape[0]:
        reasons.append("an output or a cache of another dtype, or an empty cache")
    if params.scale < MIN_LATE_SCALE:
        reasons.append(f"scale {params.scale}; the kernel scales masked scores")
    if any(isinstance(scale, Tensor) or scale != 1.0 for scale in scales):
        reasons.append("scales of the caches")
    return reasons


class HopperStreams:
    """The launch of one call signature.

    Args:
        call: a call of this signature, of which no tensor is kept.
        entries: its second stream, likewise.
        num_entries: entries of a list, or about as many as a query sees.

    Attributes:
        num_splits: splits of the slots.
    """

    def __init__(self, call: AttentionCall, entries: EntryStream, num_entries: int) -> None:
        shape, params, (left, right) = call.shape, call.params, call.params.window
        blocks, seen = latent_head_blocks(shape.num_heads), left + 1
        if not params.causal:
            seen += right
        own = -(-seen // _TILE) * _TILE
        programs = call.num_tokens * blocks
        # One CTA uses the memory of a multiprocessor.
        steps, wave = -(-(own + num_entries) // _STEP), call.limits.num_sms // max(1, programs)
        per_split = -(-steps // max(1, min(steps, wave, MAX_SPLITS)))
        # No split without slots: it would write partial results too.
        self.num_splits = -(-steps // per_split)
        config = StreamConfig(
            OWN=own,
            BLOCK_SIZE=shape.block_size,
            ENTRY_BLOCK=entries.key_cache.shape[1],
            LISTED=entries.selected is not None,
            HEADS=shape.num_heads // blocks,
            HEAD_BLOCKS=blocks,
            DV=shape.head_size_v,
            SPLIT=self.num_splits > 1,
            CAUSAL=bool(params.causal),
            HAS_RIGHT=right >= 0,
            HAS_CAP=params.logits_soft_cap > 0,
            HAS_SINK=params.sinks is not None,
            HAS_LSE=call.lse is not None,
            REGISTERS=_REGISTERS,
            EARLY=programs <= _EARLY_WAVES * call.limits.num_sms,
        )
        options = {"num_warps": 4, "enable_fp_fusion": True, "CONFIG": config}
        self._launch = BoundLaunch(hopper_streams_kernel, (programs, self.num_splits, 1), options)

    def run(self, call: AttentionCall, entries: EntryStream, partials: Tensor | None) -> None:
        """Launch on the current stream of the current device; all addresses are aligned.

        Args:
            call: its tensors and parameters.
            entries: the second stream.
            partials: float32 workspace of `paged_decode_workspace_bytes`; None with one split.
        """
        batch, params, (left, right) = call.batch, call.params, call.params.window
        second, indices = entries.key_cache, None
        count, table = entries.max_entries, entries.block_table
        if entries.selected is not None:
            indices = entries.selected.indices
            count = indices.shape[2]
        arguments = (
            *(call.query, call.key, second, call.out, partials, batch.query_start_loc),
            *(batch.seq_lens, batch.block_table, entries.num_entries, table, indices),
            *(params.sinks, call.lse, float(params.scale), float(params.logits_soft_cap)),
            *(int(left), int(right), call.num_reqs, call.num_tokens, call.shape.num_heads),
            *(count, self.num_splits, 0 if indices is None else indices.stride(0)),
            *(call.table_stride, table.stride(0), *call.query.stride()[:2]),
            *(*call.key.stride()[:2], *second.stride()[:2], *call.out.stride()[:2]),
            call.lse_stride,
        )
        self._launch.run(arguments, 0, call.query.get_device())
