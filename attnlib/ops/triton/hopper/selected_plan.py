"""Host side of the Hopper kernel over selected latents: support, grid and constants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.heuristics.device import DeviceLimits
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


def selected_latents_reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    params: AttentionParams,
    selection: KeySelection,
    limits: DeviceLimits,
) -> list[str]:
    """Return why the kernel does not serve a call with aligned addresses; empty if it does."""
    one_list = selection.query_block_size == 1 and selection.scope != SelectionScope.QUERY_HEAD
    reasons = selected_latents_unsupported_reasons(
        LayerShape.of(query, key, value, params), CallFeatures.of(params), limits, one_list
    )
    if not values_are_prefix(key, value):
        reasons.append("values that are not the first elements of the keys")
    rows = ((query, (0, 1)), (key, (0, 1)), (out, (0, 1)))
    if any(t.stride(dim) % 8 for t, dims in rows for dim in dims) or any(
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
    """The launch of one call signature.

    Attributes:
        num_splits: splits of each list.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor | None,
        params: AttentionParams,
        selection: KeySelection,
        num_entries: int,
        limits: DeviceLimits,
    ) -> None:
        num_tokens, num_heads = query.shape[:2]
        blocks = latent_head_blocks(num_heads)
        swaps = num_heads <= _SWAPPED_HEADS
        step, resident = (_TILE, 2 * limits.num_sms) if swaps else (2 * _TILE, limits.num_sms)
        self.num_splits = choose_uniform_splits(
            num_tokens * blocks, num_entries * selection.block_size, step, resident
        )
        config = _config(query, key, value, lse, params, selection)
        config = config._replace(SPLIT=self.num_splits > 1)
        options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
        programs = num_tokens * blocks
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

    def run(
        self,
        query: Tensor,
        key: Tensor,
        out: Tensor,
        lse: Tensor | None,
        partials: Tensor | None,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        indices: Tensor,
        params: AttentionParams,
    ) -> None:
        """Launch on the current stream of the current device; all addresses are aligned.

        Args:
            query, key, out, lse, query_start_loc, seq_lens, block_table, params: as in
                `selected_attention`.
            partials: float32 workspace of `paged_decode_workspace_bytes`; None with one split.
            indices: `[T, H, max_blocks]` int32; the first of the H lists is used.
        """
        left, right = params.window
        arguments = (
            query, key, out, partials, query_start_loc, seq_lens, block_table, indices,
            params.sinks, lse, float(params.scale) * float(params.k_scale),
            float(params.logits_soft_cap), int(left), int(right), int(params.attention_chunk_size),
            query_start_loc.shape[0] - 1, query.shape[0], query.shape[1], indices.shape[2],
            self.num_splits, indices.stride(0), block_table.stride(0), *query.stride()[:2],
            *key.stride()[:2], *out.stride()[:2], 0 if lse is None else lse.stride(0),
        )  # fmt: skip
        device = query.get_device()
        self._launch.run(arguments, 0, device)
        if self._repeat is not None:
            self._repeat.run(arguments, 0, device)


def _config(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor | None,
    params: AttentionParams,
    selection: KeySelection,
) -> SelectedConfig:
    """The constants of a kernel without splits and with one launch."""
    num_heads, (left, right) = query.shape[1], params.window
    blocks = latent_head_blocks(num_heads)
    return SelectedConfig(
        SELECT=selection.block_size,
        BLOCK_SIZE=key.shape[1],
        HEADS=num_heads // blocks,
        HEAD_BLOCKS=blocks,
        DV=value.shape[3],
        ROTARY=key.shape[3] - value.shape[3],
        SPLIT=False,
        CAUSAL=bool(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=params.attention_chunk_size > 0,
        HAS_CAP=params.logits_soft_cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=lse is not None,
        REGISTERS=_GATHERER_REGISTERS if num_heads <= _SWAPPED_HEADS else _CONSUMER_REGISTERS,
    )
