"""The batch and the parameters of calls of the `PagedAttention` interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import check_block_table
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams

__all__ = [
    "PagedAttentionMetadata",
    "check_blocks",
    "integer_slots",
    "packed_operation",
    "params_of",
]


@dataclass
class PagedAttentionMetadata:
    """The batch as the interface describes it.

    Attributes:
        seq_lens_tensor: `[R]`, tokens of each sequence so far, or None.
        max_decode_seq_len: length of the longest decode; 0 without decodes.
        block_tables: `[R, max blocks]`, block ids, or None.
    """

    seq_lens_tensor: Tensor | None
    max_decode_seq_len: int
    block_tables: Tensor | None


def check_blocks(value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    """Whether the blocks of sequences exist; values on a CPU and under ATTNLIB_VALIDATE."""
    check_block_table(block_tables, seq_lens, value_cache.shape[3], value_cache.shape[0])


def integer_slots(slot_mapping: Tensor) -> Tensor:
    """Slots of any shape and integer dtype as `[T]` int64.

    Raises:
        ContractError: they are not integers.
    """
    if slot_mapping.is_floating_point() or slot_mapping.is_complex():
        raise ContractError(
            f"slot_mapping is {slot_mapping.dtype}; it must hold integers, such as torch.int64",
            rule="P4",
        )
    return slot_mapping.flatten().long()


def packed_operation(name: str, rows: Tensor, value_cache: Tensor) -> Callable[..., Any]:
    """The operation that serves a call over a packed cache.

    Args:
        name: "packed_write", "packed_decode" or "packed_prefill".
        rows: the queries or new keys.
        value_cache: `[B, Hkv, D, N]`. The kernels read N positions at a time, a power of two; torch
            serves other block sizes on every device, and reads the lengths on the host.
    """
    block_size = value_cache.shape[-1]
    return operation("packed_attention", name, rows, in_torch=block_size & (block_size - 1) != 0)


def params_of(
    cache: Tensor,
    scale: float,
    alibi_slopes: Tensor | None,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    left: int = -1,
) -> AttentionParams:
    """The parameters of a call; a cache that is not float8 has no scales."""
    if cache.dtype.itemsize > 1:
        k_scale = v_scale = 1.0
    return AttentionParams(
        scale=scale, window=(left, -1), alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale
    )
