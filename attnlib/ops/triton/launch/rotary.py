"""The launch of one signature of `rotate_and_write`: what is checked and chosen once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation
from attnlib.ops.checks import check_slots, vector_elements
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.rotary import HeadNorm, check_cache_shapes, check_rotation
from attnlib.ops.scales import check_scale
from attnlib.ops.triton.kernels.head_norm import NORM_FLOAT32, NORM_NONE, NORM_ROUNDED
from attnlib.ops.triton.kernels.rotary_pages import rotate_and_write_pages_kernel
from attnlib.ops.triton.kernels.rotary_write import RotaryConfig, rotate_and_write_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.scales import scale_kind
from attnlib.ops.triton.page_write import rotary_page_constants

__all__ = ["PreparedRotation", "Write", "prepare_rotation"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ELEMENTS_PER_PROGRAM = 1024
Write = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Keys, values, their caches and slots."""


class PreparedRotation(NamedTuple):
    """The launch of one call signature, without addresses.

    Attributes:
        launch: None where there are no rows.
        numbers: the runtime arguments behind the eps of the norms: numbers, and the signs of a
            rotation for the cache.
        as_bytes: whether the kernel writes the cache as bytes.
    """

    launch: BoundLaunch | None
    numbers: tuple[Any, ...]
    as_bytes: bool


def prepare_rotation(
    query: Tensor,
    write: Write | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    scales: tuple[float | Tensor, float | Tensor],
    out: Tensor | None,
    rotation: KVRotation | None = None,
) -> PreparedRotation:
    """Check a call and choose its launch. Everything here follows from the signature.

    Raises:
        ContractError: as `rotate_and_write`.
    """
    _check(query, write, cos, sin, q_norm, k_norm, scales, out, rotation)
    rows, num_heads, size = query.shape
    written, strides = _write_constants(write, size, scales)
    num_slots = write[4].shape[0] if write is not None and write[2].shape[0] else 0
    num_kv_heads = 0 if write is None else write[3].shape[2]
    widest = max(triton.next_power_of_2(size), written["DV_PAD"])
    block_h = max(1, _ELEMENTS_PER_PROGRAM // widest)
    block_h = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), block_h)
    blocks, kv_blocks = triton.cdiv(num_heads, block_h), triton.cdiv(num_kv_heads, block_h)
    constants = {
        **written,
        **_angle_constants(size, 0 if cos is None else cos.shape[1]),
        "BLOCK_H": block_h,
        "Q_BLOCKS": blocks,
        "KV_BLOCKS": kv_blocks,
        "INTERLEAVED": interleaved,
        **_norm_constants(q_norm, k_norm),
        "VEC_Q": vector_elements("query", query),
        "VEC_A": _angle_vector(cos, sin),
        "VEC_O": _dense_vector(query) if out is None else vector_elements("out", out),
        "num_warps": 4 if triton.next_power_of_2(size) * block_h > 512 else 1,
        # One rounding of `a * b + c` would differ from the two that P11 defines.
        "enable_fp_fusion": False,
    }
    out_strides = (num_heads * size, size) if out is None else out.stride()[:2]
    numbers: tuple[Any, ...] = (
        *(num_slots, num_heads, num_kv_heads),
        *query.stride()[:2],
        *strides[:4],
        *out_strides,
        *(0 if angles is None else angles.stride(0) for angles in (cos, sin)),
        *strides[4:],
    )
    grid = (rows, blocks + 2 * kv_blocks, 1)
    kernel, launch, as_bytes = rotate_and_write_kernel, None, constants["FP8"]
    if write is not None and have_pages(scales):
        kernel, as_bytes = rotate_and_write_pages_kernel, True
        more, signs = rotary_page_constants(*write[:4], scales, rotation)
        constants, numbers = {**constants, **more}, (*numbers, signs)
    if rows and grid[1]:
        launch = BoundLaunch(kernel, grid, with_config(constants, RotaryConfig))
    return PreparedRotation(launch, numbers, as_bytes)


def have_pages(scales: tuple[Any, Any]) -> bool:
    """Whether these are scales in the pages of a cache (M16)."""
    return any(isinstance(scale, Tensor) and scale.dim() == 4 for scale in scales)


def _angle_vector(cos: Tensor | None, sin: Tensor | None) -> int:
    """`vector_elements` of rows of angles."""
    if cos is None or sin is None:
        return 1
    elements = 16 // cos.element_size()
    return elements if not (cos.stride(0) % elements or sin.stride(0) % elements) else 1


def _dense_vector(like: Tensor) -> int:
    """`vector_elements` of a contiguous tensor with the shape and dtype of this one."""
    elements = 16 // like.element_size()
    return elements if like.shape[2] % elements == 0 else 1


def _angle_constants(size: int, half: int) -> dict[str, Any]:
    """The constants of a head of `size` elements with `half` angles."""
    rest = size - 2 * half
    return {
        "D": size,
        "D_PAD": triton.next_power_of_2(size),
        "HALF": half,
        "HALF_PAD": triton.next_power_of_2(half) if half else 1,
        "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
    }


def _norm_constants(q_norm: HeadNorm | None, k_norm: HeadNorm | None) -> dict[str, Any]:
    return {
        "Q_NORM": _norm_kind(q_norm),
        "K_NORM": _norm_kind(k_norm),
        "Q_WEIGHT_OFFSET": 0.0 if q_norm is None else float(q_norm.weight_offset),
        "K_WEIGHT_OFFSET": 0.0 if k_norm is None else float(k_norm.weight_offset),
    }


def _write_constants(
    write: Write | None, size: int, scales: tuple[float | Tensor, float | Tensor]
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The constants of the cache write, and the strides of keys, values and their caches."""
    outside = (1.0, 1.0) if have_pages(scales) else scales
    kinds = {
        "K_SCALE_KIND": scale_kind("k_scale", outside[0]),
        "V_SCALE_KIND": scale_kind("v_scale", outside[1]),
    }
    names = ("VEC_K", "VEC_V", "VEC_KC", "VEC_VC")
    if write is None:
        sizes = {"BLOCK_SIZE": 1, "DV": size, "DV_PAD": triton.next_power_of_2(size)}
        return {**kinds, **sizes, **dict.fromkeys(names, 1), "FP8": False, "E5M2": False}, (0,) * 10
    key, value, key_cache, value_cache, _ = write
    size_v = value.shape[2]
    tensors = zip(names, ("key", "value", "key_cache", "value_cache"), write, strict=False)
    constants = {
        **kinds,
        "BLOCK_SIZE": value_cache.shape[1],
        "DV": size_v,
        "DV_PAD": triton.next_power_of_2(size_v),
        **{name: vector_elements(label, tensor) for name, label, tensor in tensors},
        "FP8": key_cache.dtype in _FP8 and not have_pages(scales),
        "E5M2": key_cache.dtype == torch.float8_e5m2,
    }
    strides = (
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
    )
    return constants, strides


def _norm_kind(norm: HeadNorm | None) -> int:
    if norm is None:
        return int(NORM_NONE.value)
    return int((NORM_FLOAT32 if norm.multiply_in_float32 else NORM_ROUNDED).value)


def _check(
    query: Tensor,
    write: Write | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    scales: tuple[float | Tensor, float | Tensor],
    out: Tensor | None,
    rotation: KVRotation | None,
) -> None:
    check_rotation("heads" if write is None else "query", query, cos, sin, q_norm)
    if query.dtype not in _DTYPES:
        raise ContractError(
            f"query is {query.dtype}; the kernel takes float16, bfloat16 and float32: use the "
            "operation of attnlib.ops.torch",
            rule="P11",
        )
    if out is not None and (
        out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1
    ):
        raise ContractError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; it must be "
            f"{query.dtype} {tuple(query.shape)} with last stride 1",
            rule="P11",
        )
    if write is None:
        return
    key, value, key_cache, value_cache, slots = write
    check_rotation("key", key, cos, sin, k_norm)
    check_cache_shapes(query, key, value, key_cache, value_cache, scales)
    check_slots(key, value, slots)
    if slots.shape[0] > 1 and slots.stride(0) != 1:
        raise ContractError(
            f"slot_mapping has stride {slots.stride(0)}; it must be 1: call .contiguous()",
            rule="P4",
        )
    check_scale("k_scale", scales[0])
    check_scale("v_scale", scales[1])
    if rotation is not None and not have_pages(scales):
        raise ContractError(
            "this kernel rotates heads for pages that hold their scales: rotate the keys, call "
            "rotate_heads of attnlib.ops.triton.hadamard, and write them with write_kv",
            rule="P15",
        )
    if values_are_prefix(key_cache, value_cache):
        raise ContractError(
            "the values of this cache are a prefix of its keys (latents, P10): rotate their parts "
            "of a key and write them with write_kv",
            rule="P11",
        )
