"""Slots of the query tokens, computed on the device without a host sync."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.kernels.slots import slot_mapping_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["compute_slot_mapping"]

_BLOCK_T = 64
_BLOCK_R = 64


def compute_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """The slot of every query token: block * block_size + offset of its position, which is
    seq_len - query_len + i.

    Args:
        query_start_loc: `[R + 1]` int32, where each request's tokens start.
        seq_lens: `[R]` int32, context and this step's tokens.
        block_table: `[R, M]` int32, last stride 1.
        block_size: N, positions per block.
        num_tokens: length of the result; rows at or past `query_start_loc[-1]` get -1.
        out: `[num_tokens]` int64 to write into; allocated when None.

    Returns:
        `[num_tokens]` int64.

    Raises:
        ContractError: strided metadata.
    """
    if out is None:
        out = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    if num_tokens == 0:
        return out
    limits_of(query_start_loc)
    BatchTensors(query_start_loc, seq_lens, block_table).check()
    key = (
        "slot mapping",
        out.get_device(),
        query_start_loc.dtype,
        seq_lens.dtype,
        block_table.dtype,
        out.dtype,
        seq_lens.shape,
        num_tokens,
        block_table.shape,
        block_table.stride(),
        block_size,
    )
    launch = LAUNCHES.get(key) or LAUNCHES.keep(key, _launch(num_tokens, block_size))
    numbers = (seq_lens.shape[0], num_tokens, block_table.shape[1], block_table.stride(0))
    with device_guard(query_start_loc):
        launch.run(
            (query_start_loc, seq_lens, block_table, out, *numbers),
            out.data_ptr(),
            out.get_device(),
        )
    return out


def _launch(num_tokens: int, block_size: int) -> BoundLaunch:
    constants = {
        "BLOCK_SIZE": block_size,
        "BLOCK_T": _BLOCK_T,
        "BLOCK_R": _BLOCK_R,
        "num_warps": 2,
        "enable_fp_fusion": True,
    }
    return BoundLaunch(slot_mapping_kernel, (triton.cdiv(num_tokens, _BLOCK_T), 1, 1), constants)
