"""Where the splits of a decode over latents are combined, and the launch that does so."""

from __future__ import annotations

import triton

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.hopper.decode_grid import MOST_TOKENS, are_mostly_whole, token_parts
from attnlib.ops.triton.hopper.kernels.combine import hopper_combine_kernel
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.latent_grid import LatentGrid
from attnlib.ops.triton.hopper.latent_tiles import LatentTile
from attnlib.ops.triton.hopper.sizes import LATENT_ROWS, latent_head_blocks
from attnlib.ops.triton.launch.bound import BoundLaunch

__all__ = ["combination", "combine_tile"]

_FEW_RESULTS = 1024
"""Rows of the output up to which one is combined by several programs."""
_FEW_SPLITS = 10
"""Splits of a row that two rounds of loads of 8 bring. On an H200, in us, with loads of 16 and of
8: 16 requests of 8k latents, 2 tokens of 32 heads 61.4 and 58.1, 4 tokens of 16 heads 60.0 and
58.4. Loads of 64 parts by 128 elements and of 32 by 64, one request: 2 tokens of 128 heads over 2k
19.6 and 15.9, 4 tokens of 64 heads 19.4 and 15.5, 128 heads over 8k 19.8 and 18.1."""
_SOME_SPLITS = 35
"""Splits of the 4 to 8 requests whose rows small programs combine also with few heads: 4 requests
of 4k latents, 16 heads, 13.9 and 12.2, 8 of 8k 26.5 and 26.0; one of 32k 31.8 and 33.2."""


def combination(
    call: AttentionCall, grid: LatentGrid, tile: LatentTile, is_prefill: bool
) -> tuple[bool, BoundLaunch | None]:
    """Return (whether the attention kernel combines splits itself, the launch that does so).

    Args:
        is_prefill: see `latent_plan.prepare_latent_decode`.
    """
    in_kernel = not is_prefill and _combines_in_kernel(call, grid, tile)
    if grid.whole or in_kernel:
        return in_kernel, None
    ranges = None if is_prefill else grid.ranges * tile.ranges
    return False, _combine_launch(call, grid.group, ranges)


def _combines_in_kernel(call: AttentionCall, grid: LatentGrid, tile: LatentTile) -> bool:
    """Whether the attention kernel combines splits itself: where most requests have one, and calls
    bring counters for each consumer of its CTAs."""
    counters = call.batch.counters
    if (
        grid.whole
        or tile.swaps
        or counters is None
        or counters.numel() < PREFILL_COUNTERS + 2 * grid.ctas
    ):
        return False
    return are_mostly_whole(call.num_reqs, grid.ctas // grid.blocks)


def combine_tile(
    num_reqs: int, num_tokens: int, num_heads: int, head_size_v: int, num_ranges: int | None
) -> dict[str, int]:
    """Return the tile of the combine kernel: heads, elements, splits loaded together, warps.

    With few rows, up to four programs share a row. Each loads the splits that requests of equal
    lengths have together, in at most 64 registers of each thread. Requests and tokens count as
    powers of 2, and `num_ranges` is that of requests with one block of query tokens, so that a
    warm-up over powers of 2 compiles every variant. Without `num_ranges` there is one variant.
    """
    num_reqs, num_tokens = map(triton.next_power_of_2, (num_reqs, num_tokens))
    num_rows, group = num_tokens * num_heads, num_heads // latent_head_blocks(num_heads)
    blocks = triton.cdiv(max(1, num_tokens // num_reqs), LATENT_ROWS // group)
    if num_ranges is None or num_rows > _FEW_RESULTS:
        heads = min(4, triton.next_power_of_2(group))
        tile = {"HEADS": heads, "PARTS": 1, "DV_PAD": head_size_v, "STEP": 4, "num_warps": 4}
        # Most programs of many requests would only see that there is one split.
        are_whole = num_ranges is not None and are_mostly_whole(num_reqs, num_ranges // blocks)
        return {**tile, "TOKENS": MOST_TOKENS} if are_whole else tile
    splits = num_ranges // (num_reqs * blocks) + 2
    if num_rows > _FEW_RESULTS // 4 and splits <= _FEW_SPLITS:
        return {"HEADS": 1, "PARTS": 1, "DV_PAD": head_size_v, "STEP": 8, "num_warps": 2}
    if group > 32 or _FEW_SPLITS < splits <= _SOME_SPLITS:
        size = head_size_v // 8
        return {"HEADS": 1, "PARTS": 8, "DV_PAD": size, "STEP": 32, "num_warps": 1}
    # Measured with two ranges for each SM: 32 requests of 16 heads take 50.3 us with one program
    # for each row, and 51.0 with four; 16 requests 33.3 and 32.5 us. 64 requests of 16k latents
    # take 292.7 us with a step of 8 and two warps, and 294.5 with 16 and four.
    step = min(64, max(16, triton.next_power_of_2(splits)))
    return {
        "HEADS": 1,
        "PARTS": 4,
        "DV_PAD": head_size_v // 4,
        "STEP": step,
        "num_warps": step // 16,
    }


def _combine_launch(call: AttentionCall, group: int, num_ranges: int | None) -> BoundLaunch:
    """The kernel that combines splits.

    Args:
        group: query heads of a CTA.
        num_ranges: ranges of the line of all tiles, if requests have one block of query tokens;
            None for a tile that serves any batch.
    """
    num_heads, size_v = call.shape.num_heads, call.shape.head_size_v
    tile = combine_tile(call.num_reqs, call.num_tokens, num_heads, size_v, num_ranges)
    options = {
        "NUM_KV_HEADS": num_heads // group,
        "GROUP": group,
        "DV": size_v,
        "HAS_SINK": call.params.sinks is not None,
        "HAS_LSE": call.lse is not None,
        "enable_fp_fusion": True,
        "launch_pdl": True,
        **tile,
    }
    head_blocks, programs = num_heads // group, triton.cdiv(group, tile["HEADS"]) * tile["PARTS"]
    parts = token_parts(call.num_tokens, tile, head_blocks * programs, call.limits.num_sms)
    return BoundLaunch(hopper_combine_kernel, (parts, head_blocks, programs), options)
