"""Checks of addresses: slots, block ids, lengths and offsets, before anything is read or written.

On a CPU they always run. Elsewhere reading values waits for the device, so that they run under
ATTNLIB_VALIDATE, and not while a CUDA graph is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib import env
from attnlib.errors import ContractError

__all__ = ["are_readable", "check_block_table", "check_slot_values", "check_starts"]


def are_readable(tensor: Tensor) -> bool:
    """Whether a check may read the values of a tensor."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    if tensor.device.type == "cpu":
        return True
    if not env.read("ATTNLIB_VALIDATE"):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_slot_values(slots: Tensor, num_slots: int) -> None:
    """Whether slots are inside a cache; a negative one writes nothing.

    Args:
        slots: `[T]` integers.
        num_slots: blocks times tokens per block.

    Raises:
        ContractError: names the first slot past the cache.
    """
    if not slots.numel() or not are_readable(slots) or int(slots.max()) < num_slots:
        return
    token = int((slots >= num_slots).int().argmax())
    raise ContractError(
        f"slot_mapping[{token}]={int(slots[token])} is outside the cache of {num_slots} slots "
        f"(0 to {num_slots - 1}; -1 writes nothing)",
        rule="P4",
    )


def check_block_table(
    table: Tensor, lengths: Tensor, block_size: int, num_blocks: int, *, what: str = "seq_lens"
) -> None:
    """Whether the entries that requests use are blocks of the pool; others may hold anything (P3).

    Args:
        table: `[R, M]` integers.
        lengths: `[R]` integers, tokens of each request.
        block_size: tokens of one block.
        num_blocks: blocks in the pool.
        what: name of `lengths`, for messages.

    Raises:
        ContractError: a negative length, a row that is too short, or an id outside the pool.
    """
    if not lengths.numel() or not (are_readable(table) and are_readable(lengths)):
        return
    least, most = (int(x) for x in lengths.aminmax())
    if least < 0:
        raise ContractError(
            f"{what}[{int(lengths.argmin())}]={least} must not be negative", rule="M7"
        )
    if most > table.shape[1] * block_size:
        raise ContractError(
            f"{what}[{int(lengths.argmax())}]={most} needs {-(-most // block_size)} blocks of "
            f"{block_size} tokens, but block_table has {table.shape[1]} columns",
            rule="P3",
        )
    first = torch.arange(table.shape[1], device=table.device) * block_size
    wrong = (first < lengths[:, None]) & ((table < 0) | (table >= num_blocks))
    if bool(wrong.any()):
        request, column = wrong.nonzero()[0].tolist()
        raise ContractError(
            f"block_table[{request}][{column}]={int(table[request, column])} is outside the pool "
            f"of {num_blocks} blocks (0 to {num_blocks - 1})",
            rule="P3",
        )


def check_starts(name: str, starts: Tensor, rows: int) -> None:
    """Whether offsets begin at 0, do not decrease, and end inside the rows that they divide.

    Args:
        name: of the offsets, for messages.
        starts: `[R + 1]` integers.
        rows: number of rows.

    Raises:
        ContractError: names the offset.
    """
    if not starts.numel() or not are_readable(starts):
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ContractError(f"{name}[0]={values[0]} must be 0", rule="M1")
    for index, (start, end) in enumerate(zip(values, values[1:], strict=False)):
        if end < start:
            raise ContractError(
                f"{name} falls from {start} to {end} at index {index + 1}; it must not decrease",
                rule="M1",
            )
    if values[-1] > rows:
        raise ContractError(
            f"{name} ends at {values[-1]}, past the {rows} rows that it divides", rule="M1"
        )
