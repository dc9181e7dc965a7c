"""Where each query token's key and value belong, computed on the device so that nobody waits for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered

__all__ = ["compute_slot_mapping"]

_BLOCK_T = 64
_BLOCK_R = 64


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "max_blocks", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def _slot_mapping_kernel(query_start_loc, seq_lens, block_table, slots, num_reqs, num_tokens, max_blocks,
                         stride_table, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
                         BLOCK_R: tl.constexpr):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # A token's request is the number of requests that have ended at or before it: starts never decrease.
    request = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, num_reqs, BLOCK_R):
        lanes = base + tl.arange(0, BLOCK_R)
        ends = tl.load(query_start_loc + 1 + lanes, mask=lanes < num_reqs, other=2147483647)
        request += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    live = (request < num_reqs) & (tokens < num_tokens)
    end = tl.load(query_start_loc + 1 + request, mask=live, other=0)
    seq_len = tl.load(seq_lens + request, mask=live, other=0)
    position = seq_len - end + tokens
    block_index = tl.maximum(position, 0) // BLOCK_SIZE
    live = live & (position >= 0) & (block_index < max_blocks)
    block = tl.load(
        block_table + request.to(tl.int64) * stride_table + block_index, mask=live, other=0
    ).to(tl.int64)
    slot = block * BLOCK_SIZE + tl.maximum(position, 0) % BLOCK_SIZE
    tl.store(slots + tokens, tl.where(live, slot, -1), mask=tokens < num_tokens)


def compute_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """The slot of every query token: block * block_size + offset of position seq_len - query_len + i.

    Args:
        query_start_loc: `[R + 1]` int32, where each request's tokens start.
        seq_lens: `[R]` int32, context and this step's tokens.
        block_table: `[R, M]` int32, last stride 1.
        block_size: N, positions per block.
        num_tokens: length of the result; rows at or past `query_start_loc[-1]` get -1.
        out: `[num_tokens]` int64 to write into; made when None.

    Returns:
        `[num_tokens]` int64.
    """
    if out is None:
        out = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    if num_tokens == 0:
        return out
    limits_of(query_start_loc)
    same = (
        out.get_device(), query_start_loc.dtype, seq_lens.dtype, block_table.dtype, out.dtype, seq_lens.shape, num_tokens,
        block_table.shape, block_table.stride(), block_size,
    )  # fmt: skip
    launch = _launches.get(same) or _launches.keep(same, _bind(num_tokens, block_size))
    numbers = (seq_lens.shape[0], num_tokens, block_table.shape[1], block_table.stride(0))
    with device_guard(query_start_loc):
        launch(
            (query_start_loc, seq_lens, block_table, out, *numbers),
            out.data_ptr(),
            out.get_device(),
        )
    return out


_launches: Remembered[BoundLaunch] = Remembered()


def _bind(num_tokens: int, block_size: int) -> BoundLaunch:
    constants = {
        "BLOCK_SIZE": block_size,
        "BLOCK_T": _BLOCK_T,
        "BLOCK_R": _BLOCK_R,
        "num_warps": 2,
        "enable_fp_fusion": True,
    }
    return BoundLaunch(_slot_mapping_kernel, (triton.cdiv(num_tokens, _BLOCK_T), 1, 1), constants)
