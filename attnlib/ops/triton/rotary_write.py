"""Normalize and rotate queries and keys, and write keys and values to their slots, in one launch
(P11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlib.kv_rotation import KVRotation
from attnlib.ops.addresses import check_slot_values
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.signature import scale_signature, tensor_signature
from attnlib.ops.triton.heuristics.device import device_guard
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    BoundLaunch,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.driver import CHANGES
from attnlib.ops.triton.launch.rotary import PreparedRotation, Write, prepare_rotation

__all__ = ["BoundRotation", "bind_rotation", "rotate", "rotate_and_write"]


class BoundRotation:
    """The launch for calls of one signature, which differ in addresses and in the eps of norms."""

    def __init__(self, prepared: PreparedRotation) -> None:
        self._prepared = prepared
        self._slots: int | None = None
        self._submit: Callable[..., None] | None = None

    def run(
        self,
        query: Tensor,
        write: Write | None,
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
        angles = (query if x is None else x for x in (cos, sin))
        weights = (query if norm is None else norm.weight for norm in (q_norm, k_norm))
        tensors = (query, key, value, out, key_cache, value_cache, *angles, *weights)
        addresses = [tensor.data_ptr() for tensor in tensors]
        merged = 0
        for address in addresses:
            merged |= address
        aligned = not merged & ALIGNMENT
        tail = (0.0 if q_norm is None else q_norm.eps, 0.0 if k_norm is None else k_norm.eps)
        with device_guard(query):
            if aligned and launch.is_direct and not launches_observed():
                given = (x.data_ptr() if isinstance(x, Tensor) else float(x) for x in scales)
                submit = self._bind(launch, slots)
                submit(current_stream(query.get_device()), *addresses, *given, *tail)
            else:
                if as_bytes:
                    key_cache, value_cache = (
                        cache.view(torch.uint8) for cache in (key_cache, value_cache)
                    )
                factors = (x if isinstance(x, Tensor) else float(x) for x in scales)
                first = (*tensors[:4], key_cache, value_cache, slots, *tensors[6:])
                launch.by_triton((*first, *factors, *tail, *numbers), aligned)
        return out

    def _bind(self, launch: BoundLaunch, slots: Tensor) -> Callable[..., None]:
        """The direct launch, which holds the address of the slots."""
        if self._submit is None or self._slots != slots.data_ptr():
            self._slots = slots.data_ptr()
            changing = (CHANGES,) * 8
            numbers = (x.data_ptr() if isinstance(x, Tensor) else x for x in self._prepared.numbers)
            arguments = (*changing[:6], self._slots, *changing, *numbers)
            self._submit = launch.bind(True, True, arguments)
        return self._submit


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
    rotation: KVRotation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rotate` of queries and keys and `write_kv` of the rotated keys and the values, in one
    launch.

    Args:
        query: `[T', Hq, D]` before normalization and rotation, float16, bfloat16 or float32, last
            stride 1.
        key: `[T', Hkv, D]`, likewise.
        value: `[T', Hkv, Dv]`, likewise.
        key_cache, value_cache, slot_mapping, k_scale, v_scale, rotation: as in `write_kv`. Rows
            past `slot_mapping` and rows with a negative slot are rotated, but not written.
        cos, sin, interleaved: as in `rotate`, for all T' rows.
        q_norm, k_norm: RMSNorm of query and key heads, or None.
        out: `[T', Hq, D]`, receives the rotated queries; None allocates.

    Returns:
        The rotated queries, `[T', Hq, D]`.

    Raises:
        ContractError: tensors that do not fit (P4, P11), a cache of latents, a scale that is not
            finite and above 0 (M9), or, on a CPU, a slot past the cache. Nothing is written then.
    """
    if slot_mapping.is_cpu:  # elsewhere the layer checks, under ATTNLIB_VALIDATE
        check_slot_values(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    write = (key, value, key_cache, value_cache, slot_mapping)
    scales = (k_scale, v_scale)
    norms = (q_norm, k_norm)
    bound = bind_rotation(query, write, cos, sin, interleaved, *norms, scales, out, rotation)
    return bound.run(query, write, cos, sin, q_norm, k_norm, scales, out)


def bind_rotation(
    query: Tensor,
    write: Write | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    scales: tuple[float | Tensor, float | Tensor],
    out: Tensor | None = None,
    rotation: KVRotation | None = None,
) -> BoundRotation:
    """Check a call and prepare its launch, for all calls with the same signature.

    Args:
        query: `[T, Hq, D]`.
        write: keys, values, their caches and slots; None to rotate the queries only.
        cos, sin, interleaved, q_norm, k_norm, out, rotation: as in `rotate_and_write`.
        scales: of keys and values; numbers are part of the signature.

    Raises:
        ContractError: as `rotate_and_write`.
    """
    signature = (
        "rotary",
        tensor_signature(query),
        None if out is None else tensor_signature(out),
        None if write is None else tuple(map(tensor_signature, write)),
        None if write is None else values_are_prefix(write[2], write[3]),
        None if cos is None else tensor_signature(cos),
        None if sin is None else tensor_signature(sin),
        interleaved,
        _norm_signature(q_norm),
        _norm_signature(k_norm),
        scale_signature(scales[0], query if write is None else write[2]),
        scale_signature(scales[1], query if write is None else write[3]),
        rotation,
    )
    prepared: PreparedRotation | None = LAUNCHES.get(signature)
    if prepared is None:
        given = (query, write, cos, sin, interleaved, q_norm, k_norm, scales, out, rotation)
        prepared = LAUNCHES.keep(signature, prepare_rotation(*given))
    return BoundRotation(prepared)


def _norm_signature(norm: HeadNorm | None) -> tuple[Any, ...] | None:
    if norm is None:
        return None
    return (tensor_signature(norm.weight), norm.weight_offset, norm.multiply_in_float32)
