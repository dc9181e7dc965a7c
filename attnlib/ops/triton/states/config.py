"""The constants of the kernels of a layer's recurrence."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.inputs import QK_NORM_EPS, RecurrenceParams
from attnlib.ops.states.layout import POSITION_COPIES, StateLayout
from attnlib.ops.states.tensors import KERNEL_FIELDS, StateTensors
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.kernels.state_arguments import StateConfig

__all__ = [
    "Recurrence",
    "check_dense",
    "check_slots",
    "most_queries",
    "slot_strides",
    "state_config",
    "step_tile",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Recurrence(NamedTuple):
    """What the constants follow from, besides the layout and the strides.

    Attributes:
        update, qk_norm, has_skip: as in `RecurrenceParams`.
        precision, wide: `StateConfig.PRECISION` and `WIDE`.
    """

    update: str
    qk_norm: bool
    has_skip: bool
    precision: str
    wide: bool

    @classmethod
    def on_chip(cls, params: RecurrenceParams, limits: DeviceLimits) -> Recurrence:
        """The recurrence on a chip. Three products of TF32 have the precision of float32 (T3);
        other chips multiply float32, and the interpreter does not multiply bfloat16."""
        is_nvidia = limits.capability >= (8, 0)
        return cls(
            params.update,
            params.qk_norm,
            params.skip is not None,
            "tf32x3" if is_nvidia else "ieee",
            not (is_nvidia or limits.is_amd),
        )


def slot_strides(slots: StateTensors) -> tuple[int, ...]:
    """The strides of slots of each field, 0 for those that the layout does not have."""
    fields = [getattr(slots, name) for name in KERNEL_FIELDS]
    return tuple([0 if field is None else field.stride(0) for field in fields])


def check_slots(layout: StateLayout) -> None:
    """Whether the kernels have slots of this form, chunks and heads of these sizes.

    Raises:
        ContractError: they do not.
    """
    largest = max(layout.key_size, layout.value_size)
    if layout.form != "tail" or largest > state_tiles.LARGEST_HEAD:
        raise ContractError(
            f"form={layout.form!r} with heads of {largest}; the kernels take slots of the form "
            f"'tail' and heads of at most {state_tiles.LARGEST_HEAD}",
            rule="T9",
        )
    if layout.chunk_size > state_tiles.LARGEST_CHUNK:
        raise ContractError(
            f"chunk_size={layout.chunk_size}; the kernels take at most {state_tiles.LARGEST_CHUNK}",
            rule="T9",
        )


def check_dense(**tensors: Tensor) -> None:
    """Whether the heads of tensors are dense and of a dtype that the kernels take.

    Raises:
        ContractError: names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ContractError(
                f"{name} has last stride {tensor.stride(-1)}; the kernels need 1: call "
                ".contiguous()",
                rule="T2",
            )
        if tensor.dtype not in _DTYPES:
            raise ContractError(
                f"{name} is {tensor.dtype}; the kernels take float16, bfloat16 and float32",
                rule="T3",
            )


def step_tile(
    layout: StateLayout,
    params: RecurrenceParams,
    limits: DeviceLimits,
    num_reqs: int,
    is_long: bool = False,
    is_fused: bool = False,
) -> state_tiles.StateTile:
    """The tile of a step of `num_reqs` requests with at most, or more than, D + 1 tokens, and of
    one from convolution to norm, which convolves keys in fewer programs with wide tiles."""
    fills_chip = num_reqs * layout.num_heads >= 2 * limits.num_sms
    copies = not is_long and state_tiles.can_copy(layout, limits.capability)
    kind = state_tiles.kind_of_step(layout, params, is_long, fills_chip, copies)
    if is_fused:
        kind = kind.replace("copied wide row", "copied row")
    return state_tiles.state_tile(layout.key_size, layout.value_size, layout.chunk_size, kind)


def most_queries(layout: StateLayout, tile: state_tiles.StateTile, max_query_len: int) -> int:
    """`StateConfig.QUERIES`: one kernel for single tokens, and one for more."""
    several = tile.copies and max_query_len > 1
    return triton.next_power_of_2(layout.max_rollback + 1) if several else 1


@functools.lru_cache(maxsize=1024)
def state_config(
    layout: StateLayout,
    recurrence: Recurrence,
    strides: tuple[int, ...],
    tile: state_tiles.StateTile,
    prepared: bool = False,
    chunk: int = 0,
    queries: int = 1,
    chunks: int = 0,
) -> StateConfig:
    """The constants of one layer.

    Args:
        layout: of the slots.
        recurrence: of the layer.
        strides: of tokens and heads of queries, keys, values, outputs, decays and beta, then those
            of slots.
        tile: of the step.
        prepared: for steps in three launches.
        chunk: tokens that are computed at a time; 0 for a chunk of the slots.
        queries: `StateConfig.QUERIES`, from `most_queries`.
        chunks: `StateConfig.CHUNKS`.
    """
    unit, rollback = layout.chunk_size, layout.max_rollback
    c = chunk or unit
    # Chunks begin at most D + UNIT - 1 tokens before the step. The last one is not full, nor is a
    # longer one than those of slots at the state that the step stores.
    extra = chunks or (3 * c + rollback - 3 + (unit - 1 if c > unit else 0)) // c
    # A loop with stages, on NVIDIA's chips, loads the parts of the next chunk.
    loads_ahead = tile.num_stages > 1 and recurrence.precision != "ieee"
    reloads = (tile.parts > 4 or (tile.parts * c > 64 and not prepared)) and not loads_ahead
    rows = unit, c, c.bit_length() - 1, rollback, layout.num_tail_rows
    heads = layout.num_heads, layout.num_key_heads
    keys = layout.key_size, tile.part, tile.parts, reloads
    values = layout.value_size, tile.rows, tile.blocks, tile.passes
    decode = tile.num_warps if tile.group else 0, tile.group, queries, chunks, POSITION_COPIES
    kind = recurrence.update == "delta", layout.decay, recurrence.qk_norm
    parts = layout.has_beta, recurrence.has_skip, QK_NORM_EPS, recurrence.precision
    products = recurrence.wide, extra, prepared
    every = (*rows, *heads, *keys, *values, *decode, *kind, *parts, *products, *strides)
    return StateConfig._make(every)
