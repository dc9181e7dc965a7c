"""Arguments read in plain Python, for references."""

from __future__ import annotations

from typing import Any

import torch

from tests.properties.corruptions.trial import Meaningless, Undefined

INTEGERS = (torch.int32, torch.int64)


def need(condition: object, what: str) -> None:
    """Raise `Meaningless` unless a condition holds."""
    if not condition:
        raise Meaningless(what)


def defined(condition: object, what: str) -> None:
    """Raise `Undefined` unless a condition holds."""
    if not condition:
        raise Undefined(what)


def ints(tensor: Any, dims: int = 1, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> list[Any]:
    """The values of an integer tensor."""
    need(isinstance(tensor, torch.Tensor), "a list is no tensor")
    need(tensor.dtype in dtypes, f"integers are {tensor.dtype}")
    need(tensor.dim() == dims, f"a list has {tensor.dim()} dimensions")
    return tensor.tolist()  # type: ignore[no-any-return]


def whole(value: Any, least: int = 0) -> int:
    """An integer of at least `least`."""
    need(isinstance(value, int) and not isinstance(value, bool), f"{value!r} is no integer")
    need(value >= least, f"{value} is below {least}")
    return int(value)


def offsets(values: list[int], rows: int | None = None) -> list[int]:
    """Offsets from 0 that do not decrease and end inside `rows`."""
    need(values and values[0] == 0, "offsets do not begin at 0")
    need(all(a <= b for a, b in zip(values, values[1:], strict=False)), "offsets decrease")
    need(rows is None or values[-1] <= rows, "offsets exceed their rows")
    return values


def blocks_of(row: list[int], length: int, size: int, pool: int | None) -> list[int]:
    """The blocks that a request of `length` tokens uses."""
    count = -(-length // size)
    need(length >= 0 and count <= len(row), "a row is too short")
    used = row[:count]
    need(all(0 <= block and (pool is None or block < pool) for block in used), "no such block")
    return used


def floats(tensor: Any, *shape: int | None) -> torch.Tensor:
    """A floating-point tensor of this shape; None for any size."""
    need(isinstance(tensor, torch.Tensor) and tensor.is_floating_point(), "no floats")
    need(tensor.dim() == len(shape), f"{tensor.dim()} dimensions instead of {len(shape)}")
    for size, wanted in zip(tensor.shape, shape, strict=True):
        need(wanted is None or size == wanted, f"shape {tuple(tensor.shape)}")
    found: torch.Tensor = tensor
    return found


def close(got: Any, wanted: Any, tolerance: float = 3e-5) -> None:
    """Compare tensors, lists of them, or None."""
    if isinstance(wanted, tuple | list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            close(one, other, tolerance)
    elif wanted is not None:
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def same(got: Any, wanted: Any) -> None:
    """Compare integers: tensors against lists."""
    if isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            same(one, other)
    elif wanted is not None:
        found = got.tolist() if isinstance(got, torch.Tensor) else got
        assert found == wanted, f"{found} instead of {wanted}"
