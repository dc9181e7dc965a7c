"""Ragged rows without a device sync: concatenate, take apart, and the argument checks of
`attnlib.cache.indices`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable, as_count, check_starts

__all__ = [
    "check_fits",
    "check_indices",
    "check_new_tokens",
    "check_requests",
    "check_rows",
    "checked_size",
    "concatenated",
    "rows_of",
]


def concatenated(table: Tensor, lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(the first `lengths[r]` entries of every row, padded to `size` with -1; offsets `[R+1]`)."""
    rows, width = table.shape
    starts = torch.zeros(rows + 1, dtype=torch.int64, device=table.device)
    torch.cumsum(lengths, 0, out=starts[1:])
    places = torch.arange(size, device=table.device)
    if rows == 0 or width == 0:
        return torch.full_like(places, -1), starts
    row = torch.searchsorted(starts[1:], places, right=True)
    request = row.clamp(max=rows - 1)
    column = places - starts[request]
    exists = (row < rows) & (column < width)
    return torch.where(exists, table[request, column.clamp(0, width - 1)].long(), -1), starts


def rows_of(values: Tensor, starts: Tensor, width: int, name: str) -> Tensor:
    """`[R, width]`: row r has the values from `starts[r]` to `starts[r + 1]`, then -1."""
    if starts.shape[0] < 1:
        raise ContractError(f"{name} is empty; it must have one entry more than there are requests")
    total = values.shape[0]
    begin, end = starts[:-1].long()[:, None], starts[1:].long()[:, None]
    places = begin + torch.arange(width, device=values.device)
    if total == 0:
        return torch.full_like(places, -1)
    exists = (places < end) & (places < total)
    return torch.where(exists, values[places.clamp(0, total - 1)].long(), -1)


def checked_size(name: str, size: int | None, table: Tensor | None = None) -> int:
    """A size given by the caller; None means the number of elements of `table`."""
    if size is None and table is not None:  # a default exists for flattened tables only
        return table.numel()
    return as_count(name, size)


def check_indices(dtype: torch.dtype, block_size: int, **tensors: tuple[Tensor, int]) -> None:
    """Integer tensors of the given numbers of dimensions, all on one device."""
    integers = (torch.int32, torch.int64)
    if dtype not in integers:
        raise ContractError(f"dtype={dtype} must be torch.int32 or torch.int64")
    as_count("block_size", block_size, 1)
    (first, (reference, _)), *_ = tensors.items()
    for name, (tensor, dims) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ContractError(
                f"{name} is a {type(tensor).__name__}; it must be an integer tensor"
            )
        if tensor.dtype not in integers or tensor.dim() != dims:
            raise ContractError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int32 or int64 with "
                f"{dims} dimension{'s' if dims > 1 else ''}"
            )
        if tensor.device != reference.device:
            raise ContractError(
                f"{name} is on {tensor.device}, {first} on {reference.device}: move one of them"
            )


def check_requests(**requests: int) -> None:
    """Tensors (name -> number of requests) that describe equally many requests."""
    (first, expected), *others = requests.items()
    for name, count in others:
        if count != expected:
            raise ContractError(f"{name} describes {count} requests, {first} {expected}")


def check_rows(name: str, starts: Tensor, total: int, width: int, width_name: str) -> None:
    """Whether offsets divide `total` values into rows of at most `width`.

    Raises:
        ContractError: they decrease, end past the values, or a row is longer.
    """
    check_starts(name, starts, total)
    if starts.shape[0] > 1 and are_readable(starts):
        check_fits(int(starts.diff().max()), width, width_name)


def check_fits(needed: int, size: int, name: str) -> None:
    """Whether a result of a given size holds what it must.

    Raises:
        ContractError: it does not.
    """
    if needed > size:
        raise ContractError(f"{name}={size} is too small: the values need {needed}", rule="P3")


def check_new_tokens(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> None:
    """Whether new tokens are the last ones of their requests.

    Raises:
        ContractError: offsets that decrease or end past `num_tokens`, or a request with fewer
            tokens than new ones.
    """
    check_starts("query_start_loc", query_start_loc, num_tokens)
    if not seq_lens.numel() or not are_readable(seq_lens):
        return
    wrong = seq_lens < query_start_loc.diff()
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ContractError(
            f"seq_lens[{request}]={int(seq_lens[request])} is below the "
            f"{int(query_start_loc.diff()[request])} new tokens of the request: lengths count them",
            rule="M1",
        )
