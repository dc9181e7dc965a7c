"""Normalize and rotate queries and keys, and write keys and values to their slots (P11)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation
from attnlib.ops.checks import check_slots
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.rotary import HeadNorm, check_cache_shapes, check_rotation
from attnlib.ops.scales import check_scale
from attnlib.ops.torch.cache_write import write_kv

__all__ = ["rotate", "rotate_and_write"]


@torch.no_grad()
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
        heads: `[T, H, D]`, last stride 1.
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
    check_rotation("heads", heads, cos, sin, norm)
    result = heads if norm is None else _normalized(heads, norm)
    if cos is not None and sin is not None:
        result = _rotated(result, cos, sin, interleaved)
    if out is None:
        return result.clone() if result is heads else result
    return out.copy_(result)


@torch.no_grad()
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
    """`rotate` of queries and keys, then `write_kv` of the rotated keys and the values.

    Args:
        query: `[T', Hq, D]` before normalization and rotation.
        key: `[T', Hkv, D]`, likewise.
        value: `[T', Hkv, Dv]`.
        key_cache, value_cache, slot_mapping, k_scale, v_scale, rotation: as in `write_kv`. Rows
            past `slot_mapping` and rows with a negative slot are rotated, but not written.
        cos, sin, interleaved: as in `rotate`, for all T' rows.
        q_norm, k_norm: RMSNorm of query and key heads, or None.
        out: `[T', Hq, D]`, receives the rotated queries; None allocates.

    Returns:
        The rotated queries, `[T', Hq, D]`.

    Raises:
        ContractError: tensors that do not fit (P4, P11), a cache of latents, or a scale that is not
            finite and above 0 (M9). Nothing is written then.
    """
    check_rotation("query", query, cos, sin, q_norm)
    check_rotation("key", key, cos, sin, k_norm)
    check_cache_shapes(query, key, value, key_cache, value_cache, (k_scale, v_scale))
    check_slots(key, value, slot_mapping)
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    if values_are_prefix(key_cache, value_cache):
        raise ContractError(
            "the values of this cache are a prefix of its keys (latents, P10): rotate their parts "
            "of a key and write them with write_kv",
            rule="P11",
        )
    count = slot_mapping.shape[0]
    new_key = rotate(key[:count], cos, sin, interleaved=interleaved, norm=k_norm)
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    views = (key_cache, value_cache, slot_mapping)
    write_kv(new_key, value, *views, rotation=rotation, **scales)
    return rotate(query, cos, sin, interleaved=interleaved, norm=q_norm, out=out)


def _normalized(heads: Tensor, norm: HeadNorm) -> Tensor:
    values = heads if heads.dtype == torch.float64 else heads.float()
    squares = values * values
    size = heads.shape[2]
    squares = torch.nn.functional.pad(squares, (0, (1 << (size - 1).bit_length()) - size))
    while squares.shape[2] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
    # The float32 root of MKL is not correctly rounded on AMD processors; this one is everywhere.
    root = torch.sqrt((squares * (1.0 / size) + norm.eps).double()).to(values.dtype)
    values = values * root.reciprocal()
    if not norm.multiply_in_float32:
        return values.to(heads.dtype) * norm.weight
    weight = norm.weight.to(values.dtype)
    if norm.weight_offset:
        weight = weight + norm.weight_offset
    return (values * weight).to(heads.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half, tokens = cos.shape[1], heads.shape[0]
    turning, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    cos, sin = cos[:tokens, None], sin[:tokens, None]
    pair = [first * cos - second * sin, second * cos + first * sin]
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(heads.dtype), rest), -1)
