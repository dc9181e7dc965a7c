"""Host side of the Hopper kernel over selected latents: support, grid and constants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.splits import choose_uniform_splits
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.kernels.selected_latents import hopper_selected_latents_kernel
from attnlib.ops.triton.hopper.kernels.selected_lists import SelectedConfig
from attnlib.ops.triton.hopper.kernels.selected_swap_ab import hopper_selected_swap_ab_kernel
from attnlib.ops.triton.hopper.sizes import latent_head_blocks
from attnlib.ops.triton.hopper.support import selected_latents_unsupported_reasons
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.sparse.key_selection import KeySelection, SelectionScope

__all__ = ["HopperSelectedLatents", "selected_latents_reasons"]

_TILE = 64
"""Latents of a tile."""
_SWAPPED_HEADS = 16
"""Query heads up to which latents are the rows of the products."""
_CONSUMER_REGISTERS = 216
_GATHERER_REGISTERS = 64
_MAX_REGISTERS = 128
"""Two CTAs of 8 warps share the registers of a multiprocessor; the warps that multiply get what
those that gather leave."""


def selected_latents_reasons(call: AttentionCall, selection: KeySelection) -> list[str]:
    """Return why the kernel does not serve a call with aligned addresses; empty if it does."""
    query, key, out, params = call.query, call.key, call.out, call.params
    one_list = selection.query_block_size == 1 and selection.scope != SelectionScope.QUERY_HEAD
    features = CallFeatures.of(params)
    reasons = selected_latents_unsupported_reasons(call.shape, features, call.limits, one_list)
    if not values_are_prefix(key, call.value):
        reasons.append("values that are not the first elements of the keys")
    if any(stride % 8 for t in (query, key, out) for stride in t.stride()[:2]) or any(
        t.stride(-1) != 1 for t in (query, key, out)
    ):
        reasons.append("rows that do not begin at multiples of 16 bytes")
    if out.dtype != query.dtype or not key.shape[0]:
        reasons.append("an output of another dtype, or an empty cache")
    if params.scale < MIN_LATE_SCALE:
        reasons.append(f"scale {params.scale}; the kernel scales masked scores")
    if not isinstance(params.v_scale, Tensor) and params.v_scale != 1.0:
        reasons.append(f"v_scale {params.v_scale} over a cache of {key.dtype}")
    return reasons


class HopperSelectedLatents:
    """The launches of one call signature.

    Args:
        call: a call of this signature, of which no tensor is kept.
        selection: how entries select keys.
        num_entries: entries of each list.

    Attributes:
        num_splits: splits of each list.
    """

    def __init__(self, call: AttentionCall, selection: KeySelection, num_entries: int) -> None:
        num_heads, num_sms = call.shape.num_heads, call.limits.num_sms
        programs = call.num_tokens * latent_head_blocks(num_heads)
        swaps = num_heads <= _SWAPPED_HEADS
        step, resident = (_TILE, 2 * num_sms) if swaps else (2 * _TILE, num_sms)
        self.num_splits = choose_uniform_splits(
            programs, num_entries * selection.block_size, step, resident
        )
        config = _config(call, selection)._replace(SPLIT=self.num_splits > 1)
        options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
        kernel = hopper_selected_latents_kernel
        self._repeat: BoundLaunch | None = None
        if swaps:
            kernel = hopper_selected_swap_ab_kernel
            options["maxnreg"] = _MAX_REGISTERS
            # One wave of CTAs ends with its longest list, and a second launch would come on top.
            # Lists of blocks often have entries with hidden keys, which a first launch leaves.
            if programs > resident and selection.block_size == 1:
                config = config._replace(RUNNING=False)
                again = options | {"CONFIG": config._replace(RUNNING=True, REPEAT=True)}
                self._repeat = BoundLaunch(kernel, (resident, 1, 1), again)
        grid = (programs, self.num_splits, 1)
        self._launch = BoundLaunch(kernel, grid, options | {"CONFIG": config})

    def run(self, call: AttentionCall, partials: Tensor | None, indices: Tensor) -> None:
        """Launch on the current stream of the current device; all addresses are aligned.

        Args:
            call: its tensors and parameters.
            partials: float32 workspace of `paged_decode_workspace_bytes`; None with one split.
            indices: `[T, H, max_blocks]` int32; the first of the H lists is used.
        """
        batch, params, (left, right) = call.batch, call.params, call.params.window
        assert not isinstance(params.k_scale, Tensor)
        arguments = (
            *(call.query, call.key, call.out, partials, batch.query_start_loc, batch.seq_lens),
            *(batch.block_table, indices, params.sinks, call.lse),
            *(float(params.scale) * float(params.k_scale), float(params.logits_soft_cap)),
            *(int(left), int(right), int(params.attention_chunk_size)),
            *(call.num_reqs, call.num_tokens, call.shape.num_heads, indices.shape[2]),
            *(self.num_splits, indices.stride(0), call.table_stride, *call.query.stride()[:2]),
            *(*call.key.stride()[:2], *call.out.stride()[:2], call.lse_stride),
        )
        device = call.query.get_device()
        self._launch.run(arguments, 0, device)
        if self._repeat is not None:
            self._repeat.run(arguments, 0, device)


def _config(call: AttentionCall, selection: KeySelection) -> SelectedConfig:
    """The constants of a kernel without splits and with one launch."""
    shape, params, (left, right) = call.shape, call.params, call.params.window
    blocks, swaps = latent_head_blocks(shape.num_heads), shape.num_heads <= _SWAPPED_HEADS
    return SelectedConfig(
        SELECT=selection.block_size,
        BLOCK_SIZE=shape.block_size,
        HEADS=shape.num_heads // blocks,
        HEAD_BLOCKS=blocks,
        DV=shape.head_size_v,
        ROTARY=shape.head_size - shape.head_size_v,
        SPLIT=False,
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=params.attention_chunk_size > 0,
        HAS_CAP=params.logits_soft_cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=call.lse is not None,
        REGISTERS=_GATHERER_REGISTERS if swaps else _CONSUMER_REGISTERS,
    )
