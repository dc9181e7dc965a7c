"""Normalize and rotate queries and keys, and write keys and values to their slots, in one launch
(P11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.checks import check_slots
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.rotary import HeadNorm, check_cache_shapes, check_rotation
from attnlib.ops.scales import check_scale
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.heuristics.device import device_guard
from attnlib.ops.triton.kernels.rotary_write import (
    NORM_FLOAT32,
    NORM_NONE,
    NORM_ROUNDED,
    rotate_and_write_kernel,
)
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    BoundLaunch,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.driver import CHANGES
from attnlib.ops.triton.launch.scales import scale_kind, scale_signature

__all__ = ["BoundRotation", "bind_rotation", "rotate", "rotate_and_write"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ELEMENTS_PER_PROGRAM = 1024


class _Prepared(NamedTuple):
    """The launch of one call signature, without addresses; None where there are no rows."""

    launch: BoundLaunch | None
    numbers: tuple[int, ...]
    as_bytes: bool


_Write = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Keys, values, their caches and slots."""


class BoundRotation:
    """The launch for calls of one signature, which differ in addresses and in the eps of norms."""

    def __init__(self, prepared: _Prepared) -> None:
        self._prepared = prepared
        self._slots: int | None = None
        self._submit: Callable[..., None] | None = None

    def run(
        self,
        query: Tensor,
        write: _Write | None,
        cos: Tensor | None,
        sin: Tensor | None,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
        scales: tuple[float | Tensor, float | Tensor],
        out: Tensor | None = None,
    ) -> Tensor:
        """Launch on the current stream. Arguments as in `bind_rotation`.

        Returns:
            The rotated queries.
        """
        launch, numbers, as_bytes = self._prepared
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if launch is None:
            return out
        # Arguments that the kernel does not read stand for absent ones.
        key, value, key_cache, value_cache, slots = write or (query, query, out, out, query)
        tensors = (
            query, key, value, out, key_cache, value_cache, query if cos is None else cos,
            query if sin is None else sin, query if q_norm is None else q_norm.weight,
            query if k_norm is None else k_norm.weight,
        )  # fmt: skip
        addresses = [tensor.data_ptr() for tensor in tensors]
        merged = 0
        for address in addresses:
            merged |= address
        aligned = not merged & ALIGNMENT
        q_eps = 0.0 if q_norm is None else q_norm.eps
        k_eps = 0.0 if k_norm is None else k_norm.eps
        with device_guard(query):
            if aligned and launch.is_direct and not launches_observed():
                if self._submit is None or self._slots != slots.data_ptr():
                    self._slots = slots.data_ptr()
                    changing = (CHANGES,) * 8
                    self._submit = launch.bind(
                        True, True, (*changing[:6], self._slots, *changing, *numbers)
                    )
                k_scale, v_scale = (
                    x.data_ptr() if isinstance(x, Tensor) else float(x) for x in scales
                )
                stream = current_stream(query.get_device())
                self._submit(stream, *addresses, k_scale, v_scale, q_eps, k_eps)
            else:
                if as_bytes:
                    key_cache, value_cache = (
                        cache.view(torch.uint8) for cache in (key_cache, value_cache)
                    )
                given = (x if isinstance(x, Tensor) else float(x) for x in scales)
                launch.by_triton(
                    (*tensors[:4], key_cache, value_cache, slots, *tensors[6:], *given, q_eps,
                     k_eps, *numbers),
                    aligned,
                )  # fmt: skip
        return out


def rotate(
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool = False,
    norm: HeadNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate each head; `ops.rotary` defines the arithmetic (P11).

    Args:
        heads: `[T, H, D]`, float16, bfloat16 or float32, last stride 1.
        cos, sin: `[T' >= T, half]`, the angles of each token, in the dtype of the heads or float32;
            the first 2 * half elements of a head rotate. None skips the rotation.
        interleaved: rotate elements (0, 1), (2, 3), ... (GPT-J); else (0, half), (1, half + 1), ...
            (GPT-NeoX, Llama).
        norm: RMSNorm of each head before the rotation, or None.
        out: `[T, H, D]`, written; None allocates.

    Returns:
        `[T, H, D]` in the dtype of `heads`; `out` if given.

    Raises:
        ContractError: a tensor of another shape, dtype or device.
    """
    scales = (1.0, 1.0)
    bound = bind_rotation(heads, None, cos, sin, interleaved, norm, None, scales, out)
    return bound.run(heads, None, cos, sin, norm, None, scales, out)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`rotate` of queries and keys and `write_kv` of the rotated keys and the values, in one
    launch.

    Args:
        query: `[T', Hq, D]` before normalization and rotation, float16, bfloat16 or float32, last
            stride 1.
        key: `[T', Hkv, D]`, likewise.
        value: `[T', Hkv, Dv]`, likewise.
        key_cache, value_cache, slot_mapping, k_scale, v_scale: as in `write_kv`. Rows past
            `slot_mapping` and rows with a negative slot are rotated, but not written.
        cos, sin, interleaved: as in `rotate`, for all T' rows.
        q_norm, k_norm: RMSNorm of query and key heads, or None.
        out: `[T', Hq, D]`, receives the rotated queries; None allocates.

    Returns:
        The rotated queries, `[T', Hq, D]`.

    Raises:
        ContractError: tensors that do not fit (P4, P11), a cache of latents, or a scale that is not
            finite and above 0 (M9). Nothing is written then.
    """
    write = (key, value, key_cache, value_cache, slot_mapping)
    scales = (k_scale, v_scale)
    bound = bind_rotation(query, write, cos, sin, interleaved, q_norm, k_norm, scales, out)
    return bound.run(query, write, cos, sin, q_norm, k_norm, scales, out)


def bind_rotation(
    query: Tensor,
    write: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    scales: tuple[float | Tensor, float | Tensor],
    out: Tensor | None = None,
) -> BoundRotation:
    """Check a call and prepare its launch, for all calls with the same signature.

    Args:
        query: `[T, Hq, D]`.
        write: keys, values, their caches and slots; None to rotate the queries only.
        cos, sin, interleaved, q_norm, k_norm, out: as in `rotate_and_write`.
        scales: of keys and values; numbers are part of the signature.

    Raises:
        ContractError: as `rotate_and_write`.
    """
    signature = (
        "rotary", tensor_signature(query), None if out is None else tensor_signature(out),
        None if write is None else tuple(map(tensor_signature, write)),
        None if write is None else values_are_prefix(write[2], write[3]),
        None if cos is None else tensor_signature(cos),
        None if sin is None else tensor_signature(sin), interleaved, _norm_signature(q_norm),
        _norm_signature(k_norm), scale_signature(scales[0]), scale_signature(scales[1]),
    )  # fmt: skip
    prepared: _Prepared | None = LAUNCHES.get(signature)
    if prepared is None:
        given = (query, write, cos, sin, interleaved, q_norm, k_norm, scales, out)
        prepared = LAUNCHES.keep(signature, _prepare(*given))
    return BoundRotation(prepared)


def _norm_signature(norm: HeadNorm | None) -> tuple[Any, ...] | None:
    if norm is None:
        return None
    return (tensor_signature(norm.weight), norm.weight_offset, norm.multiply_in_float32)


def _norm_kind(norm: HeadNorm | None) -> int:
    if norm is None:
        return int(NORM_NONE.value)
    return int((NORM_FLOAT32 if norm.multiply_in_float32 else NORM_ROUNDED).value)


def _prepare(
    query: Tensor,
    write: _Write | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    scales: tuple[float | Tensor, float | Tensor],
    out: Tensor | None,
) -> _Prepared:
    """Check a call and choose its launch. Everything here follows from the signature."""
    _check(query, write, cos, sin, q_norm, k_norm, scales, out)
    rows, num_heads, size = query.shape
    half = 0 if cos is None else cos.shape[1]
    out_strides = (num_heads * size, size) if out is None else out.stride()[:2]
    size_v, num_kv_heads, block_size, num_slots, fp8 = size, 0, 1, 0, None
    strides: tuple[int, ...] = (0,) * 4
    cache_strides: tuple[int, ...] = (0,) * 6
    if write is not None:
        key, value, key_cache, value_cache, slots = write
        _, block_size, num_kv_heads, size_v = value_cache.shape
        num_slots = slots.shape[0] if key_cache.shape[0] else 0
        strides = (*key.stride()[:2], *value.stride()[:2])
        cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3])
        fp8 = key_cache.dtype if key_cache.dtype in _FP8 else None
    padded, padded_v = triton.next_power_of_2(size), triton.next_power_of_2(size_v)
    block_h = max(1, _ELEMENTS_PER_PROGRAM // max(padded, padded_v))
    block_h = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), block_h)
    blocks, kv_blocks = triton.cdiv(num_heads, block_h), triton.cdiv(num_kv_heads, block_h)
    rest = size - 2 * half
    constants = {
        "BLOCK_SIZE": block_size,
        "D": size,
        "DV": size_v,
        "D_PAD": padded,
        "DV_PAD": padded_v,
        "HALF": half,
        "HALF_PAD": triton.next_power_of_2(half) if half else 1,
        "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
        "BLOCK_H": block_h,
        "Q_BLOCKS": blocks,
        "KV_BLOCKS": kv_blocks,
        "INTERLEAVED": interleaved,
        "Q_NORM": _norm_kind(q_norm),
        "K_NORM": _norm_kind(k_norm),
        "Q_WEIGHT_OFFSET": 0.0 if q_norm is None else float(q_norm.weight_offset),
        "K_WEIGHT_OFFSET": 0.0 if k_norm is None else float(k_norm.weight_offset),
        "K_SCALE_KIND": scale_kind("k_scale", scales[0]),
        "V_SCALE_KIND": scale_kind("v_scale", scales[1]),
        "FP8": fp8 is not None,
        "E5M2": fp8 == torch.float8_e5m2,
        "num_warps": 4 if padded * block_h > 512 else 1,
        # One rounding of `a * b + c` would differ from the two that P11 defines.
        "enable_fp_fusion": False,
    }
    numbers = (
        num_slots, num_heads, num_kv_heads, *query.stride()[:2], *strides, *out_strides,
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0), *cache_strides,
    )  # fmt: skip
    grid = (rows, blocks + 2 * kv_blocks, 1)
    launch = BoundLaunch(rotate_and_write_kernel, grid, constants) if rows and grid[1] else None
    return _Prepared(launch, numbers, fp8 is not None)


def _check(
    query: Tensor,
    write: _Write | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    scales: tuple[float | Tensor, float | Tensor],
    out: Tensor | None,
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
    check_cache_shapes(query, key, value, key_cache, value_cache)
    check_slots(key, value, slots)
    if slots.shape[0] > 1 and slots.stride(0) != 1:
        raise ContractError(
            f"slot_mapping has stride {slots.stride(0)}; it must be 1: call .contiguous()",
            rule="P4",
        )
    check_scale("k_scale", scales[0])
    check_scale("v_scale", scales[1])
    if any(isinstance(scale, Tensor) and scale.dim() == 4 for scale in scales):
        raise ContractError(
            "the pages of this cache hold its scales (M16), which this kernel does not write: "
            "rotate the keys and write them with write_kv",
            rule="P11",
        )
    if values_are_prefix(key_cache, value_cache):
        raise ContractError(
            "the values of this cache are a prefix of its keys (latents, P10): rotate their parts "
            "of a key and write them with write_kv",
            rule="P11",
        )
