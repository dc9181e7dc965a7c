"""`StateLayout`, the bytes of a slot: what one request keeps in one layer (T9)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

__all__ = ["POSITION_COPIES", "SlotField", "StateLayout"]

POSITION_COPIES = 4
"""Pairs of positions per state head. A program that computes a part of a head's values reads and
writes a pair of its own, so that no two programs share one (T8)."""

_FIELD_ALIGNMENT = 16
_SLOT_ALIGNMENT = 256


class SlotField(NamedTuple):
    """One tensor of a slot.

    Attributes:
        name: attribute of `StateTensors`.
        shape: of one slot.
        dtype: of the elements.
        offset: bytes from the start of the slot, a multiple of 16.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Form, sizes and dtypes of the slots of a layer.

    Rows of a ring are addressed by position: what belongs to position p is in row
    `p % num_rows`, and nothing moves when the request grows. A ring is longer than what a slot
    must keep, so that a step of at most `max_rollback + 1` tokens writes no row that it reads.

    The fields are those of a `StateSpec` on which slots depend, form and chunk size (c) as chosen.
    Hv, Hk, Dk and Dv are 0 without a recurrence, C and W without a convolution. Chunks of a request
    begin at multiples of c.
    """

    form: str
    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int
    decay: str
    has_beta: bool
    conv_channels: int
    conv_width: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    max_rollback: int
    chunk_size: int

    @property
    def num_states(self) -> int:
        """States of a slot; that of position p is number `p % num_states`."""
        return self.max_rollback + 1 if self.form == "snapshots" else 1

    @property
    def num_tail_rows(self) -> int:
        """Rows of the ring of inputs; 0 in other forms than `tail`."""
        return self.chunk_size + 2 * (self.max_rollback + 1) if self.form == "tail" else 0

    @property
    def num_window_rows(self) -> int:
        """Rows of the ring of convolution inputs; 0 without a convolution."""
        return self.conv_width + self.max_rollback if self.conv_channels else 0

    @cached_property
    def fields(self) -> tuple[SlotField, ...]:
        """The tensors of a slot, in the order of their bytes. Those without elements are absent."""
        heads, rows = self.num_heads, self.num_tail_rows
        decays = (rows, heads, self.key_size) if self.decay == "channel" else (rows, heads)
        has_decay, float32, int32 = self.decay != "constant", torch.float32, torch.int32
        shapes = (
            ("positions", (heads, POSITION_COPIES, 2), int32),
            ("window_positions", (2,) if self.conv_channels else (0,), int32),
            ("state", (self.num_states, heads, self.value_size, self.key_size), self.state_dtype),
            ("window", (self.num_window_rows, self.conv_channels), self.dtype),
            ("tail_key", (rows, self.num_key_heads, self.key_size), self.dtype),
            ("tail_value", (rows, heads, self.value_size), self.dtype),
            ("tail_log_decay", decays if has_decay else (0,), float32),
            ("tail_beta", (rows, heads) if self.has_beta else (0,), float32),
        )
        found, end = [], 0
        for name, shape, dtype in shapes:
            if prod(shape):
                found.append(SlotField(name, shape, dtype, end))
                end = _round_up(end + found[-1].num_bytes, _FIELD_ALIGNMENT)
        return tuple(found)

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes from one slot to the next, a multiple of 256."""
        last = self.fields[-1]
        return _round_up(last.offset + last.num_bytes, _SLOT_ALIGNMENT)

    def first_kept(self, computed: int, end: int) -> int:
        """The first position that the next step may continue from (T10).

        Args:
            computed: tokens before the step (n).
            end: tokens after it.
        """
        return max(computed, end - self.max_rollback)

    def chunk_start(self, position: int) -> int:
        """The multiple of c at or before a position."""
        return position // self.chunk_size * self.chunk_size


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
