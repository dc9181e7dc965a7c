"""Normalization and rotation of query and key heads: parameters and checks of both counterparts.

The arithmetic (P11), in this order for each head:

1. RMSNorm, where a `HeadNorm` is given. The statistics are float32. The squares are added in pairs
   of neighbors (elements 0 and 1, 2 and 3, ..., then sums 0 and 1, ...; a head is padded with
   zeros to a power of two), so that the sum has the same bits on every device. The inverse is
   1 / sqrt(sum * (1 / D) + eps), with correctly rounded division and square root.
2. The normalized head is rounded to its dtype and multiplied by the weight in this dtype (Llama,
   Qwen3), or multiplied in float32 by `weight + weight_offset` and then rounded (Gemma).
3. Rotation of the first 2 * half elements. The two products of an element, and their sum, are each
   rounded to the wider dtype of the head and of `cos`; the result is rounded to that of the head.

The modules of transformers compute the same functions. Step 3 has their bits; their sum of squares
has the order of a reduction of torch, so a normalized element may differ from theirs by a rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_dtype import page_format

__all__ = ["HeadNorm", "check_cache_shapes", "check_rotation"]


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each query or key head, with one weight for all heads.

    Attributes:
        weight: `[D]`, contiguous. Of the dtype of the heads, unless `multiply_in_float32`.
        eps: added to the mean of the squares.
        weight_offset: added to the weight in float32: 1 for Gemma 2 and 3, whose checkpoints store
            weight - 1. Requires `multiply_in_float32`.
        multiply_in_float32: multiply by the weight before the result is rounded (Gemma) instead of
            after (Llama, Qwen3).

    Raises:
        ContractError: `weight` is not `[D]`, `eps` is negative, or an offset is given without
            `multiply_in_float32` (P11).
    """

    weight: Tensor
    eps: float = 1e-6
    weight_offset: float = 0.0
    multiply_in_float32: bool = False

    def __post_init__(self) -> None:
        weight = self.weight
        if weight.dim() != 1 or not weight.is_floating_point() or not weight.is_contiguous():
            raise ContractError(
                f"weight is {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}; "
                "it must be floating-point, contiguous, [D]: one weight for all heads",
                rule="P11",
            )
        if not self.eps >= 0:
            raise ContractError(f"eps={self.eps} must be at least 0", rule="P11")
        if self.weight_offset and not self.multiply_in_float32:
            raise ContractError(
                f"weight_offset={self.weight_offset} is added in float32: set "
                "multiply_in_float32=True",
                rule="P11",
            )


def check_rotation(
    name: str, heads: Tensor, cos: Tensor | None, sin: Tensor | None, norm: HeadNorm | None
) -> None:
    """Check the heads of a call, and what they are normalized and rotated by.

    Args:
        name: of the tensor, for messages.
        heads: `[T, H, D]`.
        cos, sin: `[T' >= T, half]` with 2 * half <= D, or None.
        norm: or None.

    Raises:
        ContractError: a shape, dtype, stride or device does not fit (P11).
    """
    if heads.dim() != 3 or not heads.is_floating_point() or heads.stride(2) != 1:
        raise ContractError(
            f"{name} is {heads.dtype} {tuple(heads.shape)} with strides {heads.stride()}; it must "
            "be floating-point [T, heads, head_size] with last stride 1",
            rule="P11",
        )
    tokens, _, head_size = heads.shape
    if (cos is None) != (sin is None):
        raise ContractError(
            f"{'cos' if cos is None else 'sin'} is None and the other is not: pass both, or "
            "neither to skip the rotation",
            rule="P11",
        )
    if cos is not None and sin is not None:
        _check_tables(name, heads, cos, sin)
    if norm is None:
        return
    weight = norm.weight
    if weight.shape != (head_size,) or weight.device != heads.device:
        raise ContractError(
            f"the norm weight of {name} is {tuple(weight.shape)} on {weight.device}; it must be "
            f"[{head_size}] on {heads.device}",
            rule="P11",
        )
    if weight.dtype != heads.dtype and not norm.multiply_in_float32:
        raise ContractError(
            f"the norm weight of {name} is {weight.dtype}, {name} {heads.dtype}: convert the "
            "weight, or set multiply_in_float32=True if the model multiplies in float32",
            rule="P11",
        )


def _check_tables(name: str, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, _, head_size = heads.shape
    for which, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise ContractError(f"{which} is a {type(table).__name__}; pass a tensor [T, half]")
        if table.dim() != 2 or table.shape[0] < tokens or not 0 < 2 * table.shape[1] <= head_size:
            raise ContractError(
                f"{which} is {tuple(table.shape)}; it must be [T, half] with a row for each of the "
                f"{tokens} rows of {name} and 1 to {head_size // 2} columns: half of the rotated "
                "elements of a head, each angle once",
                rule="P11",
            )
        dtypes = dict.fromkeys((heads.dtype, torch.float32))
        if table.dtype not in dtypes or table.device != heads.device:
            raise ContractError(
                f"{which} is {table.dtype} on {table.device}; it must be "
                f"{' or '.join(map(str, dtypes))} on {heads.device}",
                rule="P11",
            )
        if table.stride(1) != 1 and table.shape[1] > 1:
            raise ContractError(
                f"{which} has last stride {table.stride(1)}; it must be 1", rule="P11"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ContractError(
            f"cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)}; they "
            "must agree",
            rule="P11",
        )


def check_cache_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: tuple[object, object] = (1.0, 1.0),
) -> None:
    """Check that new keys and values fit the cache and the queries.

    Args:
        query, key, value, key_cache, value_cache: as in `rotate_and_write`.
        scales: of keys and values; those of pages (M16) tell how many elements a head has.

    Raises:
        ContractError: rows, heads, head sizes or dtypes do not agree (P11).
    """
    sides = (("key", key, key_cache, scales[0]), ("value", value, value_cache, scales[1]))
    for name, new, cache, scale in sides:
        fits = new.dim() == 3 and cache.dim() == 4 and new.shape[1] == cache.shape[2]
        if fits:
            stored = page_format(cache, scale)
            size = cache.shape[3] if stored is None else stored.head_size(cache.shape[3])
            fits = new.shape[2] == size
        if not fits or new.stride(2) != 1 or cache.stride(3) != 1:
            raise ContractError(
                f"{name} is {tuple(new.shape)} with strides {new.stride()} and {name}_cache "
                f"{tuple(cache.shape)}; they must be [T, heads, size] and [B, N, heads, size] with "
                "last stride 1",
                rule="P11",
            )
        if new.dtype != query.dtype or new.device != query.device or cache.device != query.device:
            raise ContractError(
                f"{name} is {new.dtype} on {new.device}, its cache on {cache.device}, and query "
                f"{query.dtype} on {query.device}; they must agree",
                rule="P11",
            )
    if not key.shape[0] == value.shape[0] == query.shape[0]:
        raise ContractError(
            f"query, key and value have {query.shape[0]}, {key.shape[0]} and {value.shape[0]} "
            "rows; each token has one row in all three",
            rule="P11",
        )
    if key.shape[2] != query.shape[2]:
        raise ContractError(
            f"query heads have {query.shape[2]} elements and key heads {key.shape[2]}; they must "
            "agree",
            rule="P11",
        )
