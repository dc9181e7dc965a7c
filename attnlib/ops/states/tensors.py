"""`StateTensors`, the slots of one layer as views of one memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.layout import StateLayout

__all__ = ["KERNEL_FIELDS", "StateTensors"]

KERNEL_FIELDS = ("state", "positions", "tail_key", "tail_value", "tail_log_decay", "tail_beta")
"""The tensors of a recurrence in the form `tail`, in the order in which kernels take them."""


@dataclass(frozen=True, eq=False)
class StateTensors:
    """The slots of one layer. All tensors are strided by the slot, and dense within it.

    S slots; the names and sizes of dimensions are those of `StateLayout`. What a layout does not
    have is None. A slot may hold anything before its first step, NaN included (T14).

    Attributes:
        layout: form, sizes and dtypes.
        valid: slots of requests; those before them are none.
        positions: `[S, Hv, POSITION_COPIES, 2]` int32. The pair (low, high): a step may continue
            from n tokens with low <= n <= high (T8). All copies of a head are equal between steps.
        window_positions: `[S, 2]` int32, the same for the convolution.
        state: `[S, num_states, Hv, Dv, Dk]`. `plain`: the state after `high` tokens; `snapshots`:
            number `p % num_states` is that after p tokens, for low <= p <= high; `tail`: the state
            after `low // c * c` tokens. The state after 0 tokens is never stored or read.
        window: `[S, num_window_rows, C]`, the last inputs of the convolution.
        tail_key, tail_value, tail_log_decay, tail_beta: `[S, num_tail_rows, Hk, Dk]`,
            `[S, num_tail_rows, Hv, Dv]`, `[S, num_tail_rows, Hv]` or `[S, num_tail_rows, Hv, Dk]`,
            `[S, num_tail_rows, Hv]`: the inputs of the positions from `low // c * c` up to `high`,
            as they were given, neither normalized nor scaled.
        counters: `[S, Hv]` int32 zeros beside the slots, which a fused step leaves at zero. None
            without a convolution and a recurrence.
    """

    layout: StateLayout
    valid: range
    # None where the layout has none, which nothing reads: layers check what a call needs.
    positions: Tensor = None  # type: ignore[assignment]
    window_positions: Tensor = None  # type: ignore[assignment]
    state: Tensor = None  # type: ignore[assignment]
    window: Tensor = None  # type: ignore[assignment]
    tail_key: Tensor | None = None
    tail_value: Tensor | None = None
    tail_log_decay: Tensor | None = None
    tail_beta: Tensor | None = None
    counters: Tensor | None = None

    @classmethod
    def from_bytes(cls, layout: StateLayout, slots: Tensor, first_slot: int = 0) -> StateTensors:
        """Views of memory.

        Args:
            layout: of a slot.
            slots: `[S, at least bytes_per_slot]` uint8; the last dimension is dense, and slots
                begin at multiples of 16 bytes.
            first_slot: the first one of a request.

        Raises:
            ContractError: another dtype, too few bytes per slot, or other strides.
        """
        fits = slots.dim() == 2 and slots.shape[1] >= layout.bytes_per_slot
        misplaced = slots.stride(0) % 16 or slots.storage_offset() % 16
        misplaced = misplaced or (len(slots) > 1 and slots.stride(0) < layout.bytes_per_slot)
        if slots.dtype != torch.uint8 or not fits or slots.stride(1) != 1 or misplaced:
            raise ContractError(
                f"slots have shape {tuple(slots.shape)}, strides {slots.stride()}, offset "
                f"{slots.storage_offset()} and dtype {slots.dtype}; they must be "
                f"[S, {layout.bytes_per_slot} or more] uint8 with a dense last dimension, and "
                "begin at multiples of 16 bytes, each behind the one before",
                rule="T15",
            )
        views = {
            field.name: slots[:, field.offset : field.offset + field.num_bytes]
            .view(field.dtype)
            .view(slots.shape[0], *field.shape)
            for field in layout.fields
        }
        if layout.num_heads and layout.conv_channels:
            shape = (slots.shape[0], layout.num_heads)
            views["counters"] = torch.zeros(shape, dtype=torch.int32, device=slots.device)
        return cls(layout, range(first_slot, len(slots)), **views)

    @functools.cached_property
    def for_kernels(self) -> tuple[Tensor, ...]:
        """`KERNEL_FIELDS`; the state stands for those that a layout with tails does not have."""
        given = (getattr(self, name) for name in KERNEL_FIELDS)
        return tuple(self.state if each is None else each for each in given)

    @property
    def num_slots(self) -> int:
        """S."""
        return self._first.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self._first.device

    @property
    def _first(self) -> Tensor:
        """A layout has a recurrence, a convolution, or both."""
        return self.window_positions if self.positions is None else self.positions
