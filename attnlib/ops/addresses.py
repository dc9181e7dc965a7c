"""Checks of addresses: slots, block ids, lengths and offsets, before anything is read or written.

On a CPU they always run. Elsewhere reading values waits for the device, so that they run under
ATTNLIB_VALIDATE, and not while a CUDA graph is captured.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from attnlib import env
from attnlib.errors import ContractError

__all__ = [
    "are_readable",
    "as_count",
    "as_id",
    "as_ids",
    "check_block_table",
    "check_lengths",
    "check_slot_values",
    "check_starts",
    "shortened",
]


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
    table: Tensor,
    lengths: Tensor,
    block_size: int,
    num_blocks: int | None,
    *,
    what: str = "seq_lens",
) -> None:
    """Whether the entries that requests use are blocks of the pool; others may hold anything (P3).

    Args:
        table: `[R, M]` integers.
        lengths: `[R]` integers, tokens of each request.
        block_size: tokens of one block.
        num_blocks: blocks in the pool; None if it is not known.
        what: name of `lengths`, for messages.

    Raises:
        ContractError: another number of rows, a negative length, a row that is too short, or an id
            outside the pool.
    """
    if table.dim() != 2 or lengths.dim() != 1 or table.shape[0] != lengths.shape[0]:
        raise ContractError(
            f"block_table has shape {tuple(table.shape)} and {what} {tuple(lengths.shape)}; they "
            "must be [R, blocks] and [R]",
            rule="P3",
        )
    if not lengths.numel() or not (are_readable(table) and are_readable(lengths)):
        return
    least, most = (int(x) for x in lengths.aminmax())
    if least < 0:
        raise ContractError(
            f"{what}[{int(lengths.argmin())}]={least} must not be negative", rule="M7"
        )
    if most > table.shape[1] * block_size:
        request = int(lengths.argmax())
        raise ContractError(
            f"block_table row {request} has {table.shape[1]} entries, but {what}[{request}]="
            f"{most} needs {-(-most // block_size)} blocks of {block_size} tokens",
            rule="P3",
        )
    if not table.numel():
        return
    lowest, highest = (int(x) for x in table.aminmax())
    if lowest >= 0 and (num_blocks is None or highest < num_blocks):
        return
    first = torch.arange(table.shape[1], device=table.device) * block_size
    outside = table < 0 if num_blocks is None else (table < 0) | (table >= num_blocks)
    wrong = (first < lengths[:, None]) & outside
    if bool(wrong.any()):
        request, column = wrong.nonzero()[0].tolist()
        limit = (
            "must not be negative"
            if num_blocks is None
            else f"is outside the pool of {num_blocks} blocks (0 to {num_blocks - 1})"
        )
        raise ContractError(
            f"block_table[{request}][{column}]={int(table[request, column])} {limit}", rule="P3"
        )


def check_lengths(name: str, lengths: Tensor, most: int, limit: str) -> None:
    """Whether lengths are from 0 to what a row of a table holds.

    Args:
        name: of the lengths, for messages.
        lengths: `[R]` integers.
        most: the largest allowed one.
        limit: what has this size, for messages.

    Raises:
        ContractError: names the first length outside.
    """
    if not lengths.numel() or not are_readable(lengths):
        return
    wrong = (lengths < 0) | (lengths > most)
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ContractError(
            f"{name}[{request}]={int(lengths[request])} must be from 0 to {most}, {limit}",
            rule="P3",
        )


def check_starts(
    name: str, starts: Tensor, rows: int | None, max_query_len: int | None = None
) -> None:
    """Whether offsets begin at 0, do not decrease, and end inside the rows that they divide.

    Args:
        name: of the offsets, for messages.
        starts: `[R + 1]` integers.
        rows: number of rows; None if it is not known.
        max_query_len: the most rows between two of them; None for any number.

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
    if rows is not None and values[-1] > rows:
        raise ContractError(
            f"{name} ends at {values[-1]}, past the {rows} rows that it divides", rule="M1"
        )
    longest = max((b - a for a, b in zip(values, values[1:], strict=False)), default=0)
    if max_query_len is not None and longest > max_query_len:
        raise ContractError(
            f"{name} has {longest} rows of one request, and max_query_len={max_query_len}: build "
            "the metadata with an upper bound",
            rule="M1",
        )


def as_id(what: str, block: Any, position: int | None = None) -> int:
    """A block id as `int`; integers of other types, numpy's for example, are converted.

    Args:
        what: how the error message calls the id.
        block: the id.
        position: its index, for the message; None for a single id.

    Raises:
        ContractError: it is not an integer.
    """
    try:
        if isinstance(block, bool):
            raise TypeError
        return operator.index(block)
    except (TypeError, RuntimeError):  # torch raises the latter for tensors on the device meta
        where = "" if position is None else f" (index {position})"
        found = f"{what} {shortened(block)}{where} is a {type(block).__name__}"
        raise ContractError(f"{found}; it must be an integer", rule="P3") from None


def as_ids(name: str, ids: Iterable[Any], *, ordered: bool = False) -> list[Any]:
    """Ids as a list; their values are not checked.

    Args:
        name: of the argument, for messages.
        ids: the ids.
        ordered: their order has a meaning.

    Raises:
        ContractError: a single id, or a set or a dictionary in place of an order.
    """
    if ordered and isinstance(ids, Set | Mapping):
        kind = type(ids).__name__
        raise ContractError(f"{name} are a {kind}, which has no order: pass a list", rule="P3")
    try:
        return list(ids)
    except TypeError:
        found = f"{name}={shortened(ids)} is a {type(ids).__name__}"
        raise ContractError(f"{found}; it must be a list of ids, such as [0]", rule="P3") from None


def shortened(value: object) -> str:
    """The representation of a value, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_count(name: str, count: Any, least: int = 0) -> int:
    """A number of things as `int`.

    Args:
        name: of the argument, for messages.
        count: the number.
        least: the smallest that is allowed.

    Raises:
        ContractError: it is not an integer, or below `least`.
    """
    found = as_id(name, count)
    if found < least or found >= 2**63:  # torch takes no larger sizes
        low = f"be at least {least}" if least else "not be negative"
        limit = low if found < least else "be below 2^63"
        raise ContractError(f"{name}={shortened(found)} must {limit}")
    return found
