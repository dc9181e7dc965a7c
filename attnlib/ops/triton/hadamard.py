"""Rotation of heads for the cache, in one launch (P15)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_rotation import rotation_block
from attnlib.ops.checks import vector_elements
from attnlib.ops.hadamard import LARGEST_INPUT, check_heads, sign_table, unit_factor
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.heuristics.device import device_guard, limits_of, programmatic_launch
from attnlib.ops.triton.kernels.hadamard import HadamardConfig, rotate_heads_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config

__all__ = ["rotate_heads"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ELEMENTS_PER_PROGRAM = 1024
_FEW_ELEMENTS = 2**20
"""Elements of a call up to which a program has half as many: 256 tokens of 32 heads of 128 in front
of a decode and behind it take 146.4 instead of 147.6 us with the decode, fewer the same (H200)."""


def rotate_heads(
    heads: Tensor, seed: int = 0, *, inverse: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotate each head; `ops.hadamard` defines the arithmetic (P15).

    Args:
        heads: `[T, H, D]`, float16, bfloat16 or float32, last stride 1.
        seed: of the signs.
        inverse: rotate back.
        out: like `heads`, which it may be; None allocates.

    Returns:
        `[T, H, D]` in the dtype of `heads`; `out` if given.

    Raises:
        ContractError: a tensor of another shape, dtype or device.
    """
    if out is None:
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if not heads.numel():
        return out
    key = ("hadamard", tensor_signature(heads), tensor_signature(out), inverse)
    launch: BoundLaunch = LAUNCHES.get(key) or LAUNCHES.keep(key, _prepare(heads, out, inverse))
    signs = sign_table(seed, heads.device, heads.shape[2])
    numbers = (heads.shape[1], *heads.stride()[:2], *out.stride()[:2])
    addresses = heads.data_ptr() | out.data_ptr() | signs.data_ptr()
    with device_guard(heads):
        launch.run((heads, out, signs, *numbers), addresses, heads.get_device())
    return out


def _prepare(heads: Tensor, out: Tensor, inverse: bool) -> BoundLaunch:
    """The launch of a signature.

    Raises:
        ContractError: as `rotate_heads`.
    """
    check_heads(heads, out)
    if heads.dtype not in _DTYPES:
        raise ContractError(
            f"heads are {heads.dtype}; the kernel takes float16, bfloat16 and float32: use the "
            "operation of attnlib.ops.torch",
            rule="P15",
        )
    tokens, num_heads, size = heads.shape
    block = rotation_block(size)
    rows = num_heads * (size // block)
    most = _ELEMENTS_PER_PROGRAM // (2 if heads.numel() <= _FEW_ELEMENTS else 1)
    per_program = min(triton.next_power_of_2(rows), max(1, most // block))
    constants = {
        "BLOCK": block,
        "BLOCKS": size // block,
        "ROWS": per_program,
        "INVERSE": inverse,
        "VEC_X": vector_elements("heads", heads),
        "VEC_O": vector_elements("out", out),
        "FACTOR": unit_factor(size),
        "LIMIT": LARGEST_INPUT,
        "LARGEST": torch.finfo(heads.dtype).max,
        "num_warps": 4 if per_program * block >= 512 else 1,
    }
    grid = (tokens, triton.cdiv(rows, per_program), 1)
    constants |= programmatic_launch(limits_of(heads), grid[0] * grid[1])
    return BoundLaunch(rotate_heads_kernel, grid, with_config(constants, HadamardConfig))
