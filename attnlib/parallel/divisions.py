"""How the positions of a request are divided among the ranks of a group (X1).

A division maps a position to (rank, local index) and back. Each rank counts the positions that it
holds from 0, in ascending order. All methods take integers or integer tensors of any shape, and
run on the device of the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count

__all__ = ["Contiguous", "Division", "Interleaved", "ZigZag"]

_ENDLESS = 1 << 30
"""More runs than any request has."""


@dataclass(frozen=True)
class Division(ABC):
    """Positions of a request among `world_size` ranks. Methods take positions, indices and lengths
    as integers or integer tensors, and return the same kind.

    Attributes:
        world_size: ranks of the group.

    Raises:
        ContractError: a size below 1.
    """

    world_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(
                    f"{name}={value!r} of {type(self).__name__} must be an integer of at least 1",
                    rule="X1",
                )

    @abstractmethod
    def owner(self, position: Any) -> Any:
        """The rank that holds a position."""

    @abstractmethod
    def local(self, position: Any) -> Any:
        """The index of a position on the rank that holds it."""

    @abstractmethod
    def count(self, length: Any, rank: int) -> Any:
        """How many of the positions `[0, length)` a rank holds."""

    @property
    @abstractmethod
    def run_length(self) -> int:
        """Positions of a run."""

    @abstractmethod
    def gaps(self, rank: int) -> tuple[int, int]:
        """`(size, count)`: `size` positions of other ranks follow each of the first `count` runs of
        a rank."""

    def position(self, local: Any, rank: int) -> Any:
        """The position of a local index of a rank."""
        size, count = self.gaps(rank)
        passed = _least(local // self.run_length, count)
        return local + rank * self.run_length + passed * size

    def bound(self, length: int) -> int:
        """The most positions of `[0, length)` that a rank holds."""
        counts: list[int] = [self.count(length, rank) for rank in range(self.world_size)]
        return max(counts)


@dataclass(frozen=True)
class Interleaved(Division):
    """Round robin: runs of `run` positions go to the ranks in order. Growing requests stay even.

    Attributes:
        run: consecutive positions that one rank holds.
    """

    run: int = 1

    @property
    def run_length(self) -> int:
        return self.run

    @property
    def period(self) -> int:
        """Positions after which the pattern repeats."""
        return self.world_size * self.run

    def owner(self, position: Any) -> Any:
        return position // self.run % self.world_size

    def local(self, position: Any) -> Any:
        return position // self.period * self.run + position % self.run

    def count(self, length: Any, rank: int) -> Any:
        rest = _clamp(length % self.period - rank * self.run, self.run)
        return length // self.period * self.run + rest

    def gaps(self, rank: int) -> tuple[int, int]:
        return self.period - self.run, _ENDLESS


@dataclass(frozen=True)
class Contiguous(Division):
    """One run per rank: rank r holds `[r * span, (r + 1) * span)`, the last rank the rest.

    Attributes:
        span: positions of one rank.
    """

    span: int

    @classmethod
    def of_length(cls, world_size: int, length: int) -> Contiguous:
        """An even division of a request of this length; both are integers, else `ContractError`."""
        length, ranks = as_count("length", length), as_count("world_size", world_size, 1)
        return cls(ranks, max(1, -(-length // ranks)))

    @property
    def run_length(self) -> int:
        return self.span

    def owner(self, position: Any) -> Any:
        return _least(position // self.span, self.world_size - 1)

    def local(self, position: Any) -> Any:
        return position - self.owner(position) * self.span

    def count(self, length: Any, rank: int) -> Any:
        last = rank == self.world_size - 1
        return _clamp(length - rank * self.span, None if last else self.span)

    def gaps(self, rank: int) -> tuple[int, int]:
        return 0, 0


@dataclass(frozen=True)
class ZigZag(Division):
    """Two runs per rank: of 2 * world_size chunks, rank r holds chunk r and chunk
    `2 * world_size - 1 - r`, so that the causal pairs of queries and keys of all ranks are as many.
    Positions past the last chunk belong to it.

    Attributes:
        span: positions of one chunk.
    """

    span: int

    @classmethod
    def of_length(cls, world_size: int, length: int) -> ZigZag:
        """An even division of a request of this length; both are integers, else `ContractError`."""
        length, ranks = as_count("length", length), as_count("world_size", world_size, 1)
        return cls(ranks, max(1, -(-length // (2 * ranks))))

    @property
    def run_length(self) -> int:
        return self.span

    @property
    def last_chunk(self) -> int:
        """Index of the last chunk."""
        return 2 * self.world_size - 1

    def _chunk(self, position: Any) -> Any:
        return _least(position // self.span, self.last_chunk)

    def owner(self, position: Any) -> Any:
        chunk = self._chunk(position)
        return _least(chunk, self.last_chunk - chunk)

    def local(self, position: Any) -> Any:
        chunk = self._chunk(position)
        second = chunk // self.world_size  # 0 or 1
        return position - chunk * self.span + second * self.span

    def count(self, length: Any, rank: int) -> Any:
        first = _clamp(length - rank * self.span, self.span)
        rest = length - (self.last_chunk - rank) * self.span
        return first + _clamp(rest, None if rank == 0 else self.span)

    def gaps(self, rank: int) -> tuple[int, int]:
        return (self.last_chunk - 2 * rank - 1) * self.span, 1

    def segments(self, rank: int, length: int) -> list[tuple[int, int]]:
        """The runs `[first, end)` of a rank in a request of this length; some may be empty."""
        chunks = (rank, self.last_chunk - rank)
        ends = (self.span, self.span if rank else length)
        return [
            (min(chunk * self.span, length), min(chunk * self.span + size, length))
            for chunk, size in zip(chunks, ends, strict=True)
        ]


def _least(value: Any, most: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return min(value, most)
    return torch.minimum(value, most) if isinstance(most, torch.Tensor) else value.clamp(max=most)


def _clamp(value: Any, most: int | None) -> Any:
    """At least 0 and at most `most`."""
    if isinstance(value, torch.Tensor):
        return value.clamp(min=0, max=most)
    return max(value, 0) if most is None else min(max(value, 0), most)
