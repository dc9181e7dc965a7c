"""Host side of the Hopper decode over latents: which calls it serves, grid and constants.

Launches, workspace and argument order are those of `decode_launches.HopperDecode`, with blocks of
up to 64 query heads in the place of KV heads.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.hopper.decode_grid import hopper_decode_workspace_bytes, workers_per_head
from attnlib.ops.triton.hopper.decode_launches import HopperDecode, unbounded
from attnlib.ops.triton.hopper.descriptors import CacheView
from attnlib.ops.triton.hopper.kernels.combine import hopper_combine_kernel
from attnlib.ops.triton.hopper.kernels.latent_decode import hopper_latent_decode_kernel
from attnlib.ops.triton.hopper.kernels.latent_few_heads import hopper_latent_few_heads_kernel
from attnlib.ops.triton.hopper.sizes import LATENT_ROWS, LATENT_SIZES, latent_head_blocks
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.run import run_attention

__all__ = ["latent_decode_workspace_bytes", "launch_latent_decode", "prepare_latent_decode"]

_TILE = 64
"""Latents of a tile: two tiles and the queries fill the shared memory."""
_FEW_ROWS = 16
"""Query rows up to which latents are the rows of the products."""
_LEAST_TILES = 2
"""Units of work of a range, at least: with shorter ones, combining takes longer than it saves."""
_FEW_RESULTS = 1024
"""Rows of the output up to which one is combined by several programs."""
_REGISTERS = {"CONSUMER_REGISTERS": 224, "LOADER_REGISTERS": 40}
_FEW_ROWS_REGISTERS = {"LOADER_REGISTERS": 32, "maxnreg": 128}
"""The consumer gets what the others leave. With 168 registers instead of 128, 64 requests of 16k
latents take 282.5 us instead of 281.2 on an H200."""


def latent_decode_workspace_bytes(
    num_tokens: int, num_heads: int, max_query_len: int, num_sms: int
) -> int:
    """Workspace in bytes, as `hopper_decode_workspace_bytes`."""
    blocks = latent_head_blocks(num_heads)
    return hopper_decode_workspace_bytes(
        num_tokens, blocks, num_heads // blocks, max_query_len, LATENT_SIZES[1], num_sms
    )


def _combine_tile(
    num_reqs: int, num_rows: int, group: int, head_size_v: int, num_ranges: int
) -> dict[str, int]:
    """Return the tile of the combine kernel, as `decode_grid.combine_tile`.

    With few rows, up to four programs share a row. Each loads the splits that requests of equal
    lengths have together, in at most 64 registers of each thread. The number of requests counts as
    a power of 2, so that a warm-up over powers of 2 compiles every variant.
    """
    if num_rows > _FEW_RESULTS:
        # Most programs of many requests only see that there is one split: fewer take less time.
        warps = 8 if 2 * triton.next_power_of_2(num_reqs) > num_ranges else 4
        heads = min(warps, triton.next_power_of_2(group))
        return {"HEADS": heads, "PARTS": 1, "DV_PAD": head_size_v, "STEP": 4, "num_warps": warps}
    splits = num_ranges // triton.next_power_of_2(num_reqs) + 2
    # Measured with two ranges for each SM: 32 requests of 16 heads take 50.3 us with one program
    # for each row, and 51.0 with four; 16 requests 33.3 and 32.5 us. 64 requests of 16k latents
    # take 292.7 us with a step of 8 and two warps, and 294.5 with 16 and four.
    whole_rows = group <= _FEW_ROWS and num_rows > _FEW_RESULTS // 4
    step = min(64, max(8 if whole_rows else 16, triton.next_power_of_2(splits)))
    parts = 1 if whole_rows and step <= 16 else 4
    return {
        "HEADS": 1, "PARTS": parts, "DV_PAD": head_size_v // parts, "STEP": step,
        "num_warps": step // (4 * parts),
    }  # fmt: skip


def prepare_latent_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    max_query_len: int,
    max_ctas: int | None = None,
) -> HopperDecode:
    """Prepare the launches of calls like this one; at least one query and block.

    Args:
        max_ctas: CTAs that may run at a time; None means one per SM.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size = key.shape[:2]
    assert batch.block_table is not None and not isinstance(params.k_scale, Tensor)
    head_size_v, head_blocks = value.shape[3], latent_head_blocks(num_heads)
    group = num_heads // head_blocks
    rows, (left, right) = group * max_query_len, params.window
    num_reqs = batch.query_start_loc.shape[0] - 1
    chunk, cap = params.attention_chunk_size, params.logits_soft_cap
    few = rows <= _FEW_ROWS
    resident = max_ctas or limits.num_sms
    ctas = workers_per_head(resident, head_blocks, 1) * head_blocks
    num_partials, stride_lt = 2 * ctas * rows, 0 if lse is None else lse.stride(0)
    box, adjacent = min(block_size, _TILE), key.stride(1) == head_size
    shared = {
        "NUM_KV_HEADS": head_blocks, "GROUP": group, "DV": head_size_v,
        "HAS_SINK": params.sinks is not None, "HAS_LSE": lse is not None,
        "enable_fp_fusion": True, "launch_pdl": True,
    }  # fmt: skip
    attend = {
        **shared, "ROTARY": head_size - head_size_v,
        "TILE_TOKENS": (_FEW_ROWS if few else LATENT_ROWS) // group,
        "BLOCK_SIZE": block_size, "ROWS": _FEW_ROWS if few else LATENT_ROWS,
        "CAUSAL": bool(params.causal), "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0,
        "HAS_CHUNK": chunk > 0, "HAS_CAP": cap > 0, "num_warps": 4,
        "LEAST": _LEAST_TILES, **(_FEW_ROWS_REGISTERS if few else _REGISTERS),
    }  # fmt: skip
    kernel = hopper_latent_few_heads_kernel if few else hopper_latent_decode_kernel
    combine = {
        **shared,
        **_combine_tile(num_reqs, num_tokens * num_heads, group, head_size_v, ctas // head_blocks),
    }  # fmt: skip
    programs = triton.cdiv(group, combine["HEADS"]) * combine["PARTS"]
    return HopperDecode(
        limits=limits,
        index=query.get_device(),
        packed=False,
        is_quantized=False,
        reads_address=not few,
        last_strides=() if few else (adjacent * key.stride(0),),
        views=(
            CacheView.of(key, box, head_size - head_size_v),
            CacheView.of(value, box, head_size_v // 4),
        ),
        scale=params.scale * float(params.k_scale),
        score_sizes=(),
        numbers=(
            float(cap), unbounded(left), unbounded(right), unbounded(chunk), num_reqs, num_tokens,
            num_blocks, rows, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            stride_lt, batch.block_table.stride(0),
        ),
        combine_tail=(num_reqs, rows, out.stride(0), out.stride(1), stride_lt),
        lse_offset=num_partials * head_size_v,
        header_offset=num_partials * (head_size_v + 1),
        workspace_bytes=hopper_decode_workspace_bytes(
            num_tokens, head_blocks, group, max_query_len, head_size_v, resident
        ),
        attend=BoundLaunch(kernel, (ctas, 1, 1), attend),
        combine=BoundLaunch(
            hopper_combine_kernel, (num_tokens, head_blocks, programs), combine
        ),
    )  # fmt: skip


def launch_latent_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor,
) -> None:
    """Run the kernel once; arguments as in `paged_decode`.

    Raises:
        ContractError: tensors off 16-byte boundaries, or a workspace that is too small.
    """
    if query.numel() == 0:
        return
    batch = BatchTensors(query_start_loc, seq_lens, block_table, workspace=workspace)
    prepared = prepare_latent_decode(
        query, key_cache, value_cache, out, lse, batch, params, limits_of(query), max_query_len
    )
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    run_attention(prepared, call)
