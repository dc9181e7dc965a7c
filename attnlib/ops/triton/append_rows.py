"""Append one token to dense keys and values `[B, Hkv, capacity, D]`, both in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.checks import vector_elements
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels.append_rows import append_rows_kernel
from attnlib.ops.triton.kernels.cache_write import WriteConfig
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    CHANGES,
    BoundLaunch,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config

__all__ = ["RowAppend"]

_ELEMENTS_PER_PROGRAM = 2048


class RowAppend:
    """Writes new keys and values of one layout to buffers of one layout.

    Args:
        key: `[B, Hkv, 1, D]`, last stride 1; only layouts are read.
        value: `[B, Hkv, 1, Dv]`, likewise.
        keys: `[B, Hkv, capacity, D]` of the same dtype and device, last stride 1.
        values: `[B, Hkv, capacity, Dv]`, likewise.

    Raises:
        ContractError: other shapes, dtypes or devices, or a last dimension that is not dense.
    """

    def __init__(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        for name, new, buffer in (("key", key, keys), ("value", value, values)):
            expected = (*buffer.shape[:2], 1, buffer.shape[3])
            if new.shape != expected or new.dtype != buffer.dtype or new.device != buffer.device:
                raise ContractError(
                    f"{name} is {tuple(new.shape)} of {new.dtype} on {new.device}; the buffer "
                    f"takes {expected} of {buffer.dtype} on {buffer.device}"
                )
        self._capacity = keys.shape[2]
        self._index = keys.get_device()
        self._numbers = (
            keys.shape[1],
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *(*_strides(keys), *_strides(values)),
        )
        wide = tuple(number >= 1 << 31 for number in self._numbers)
        self._launch = _launch(key, value, keys, values, wide)
        self._submit: Callable[..., None] | None = None
        self._stream: Callable[[int], int] = current_stream

    def prepare(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, position: int
    ) -> None:
        """Compile the kernel, by writing a token that the buffers have at `position`; nothing where
        it can be launched directly. Arguments as of `run`."""
        if not self._launch.is_direct:
            self.run(key, value, keys, values, position)

    def run(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, position: int) -> None:
        """Write a token on the current stream.

        Args:
            key, value, keys, values: tensors of the layout of those that the object was made from.
            position: row of the buffers, below their capacity.
        """
        assert 0 <= position < self._capacity  # the caller makes room
        submit, address, address_v = self._submit, key.data_ptr(), value.data_ptr()
        begin, begin_v = keys.data_ptr(), values.data_ptr()
        aligned = not (address | address_v | begin | begin_v) & ALIGNMENT
        if submit is not None and aligned and not launches_observed():
            if chips.current_device() == self._index:
                stream = self._stream(self._index)
                submit(stream, address, address_v, begin, begin_v, position)
                return
        self._run(key, value, keys, values, position, aligned)

    def _run(self, *arguments: Any) -> None:
        """The same through Triton, or on another device than the current one.

        Args:
            arguments: tensors and position as in `run`; whether all addresses are multiples of 16.
        """
        *tensors, position, aligned = arguments
        if self._submit is None and self._launch.is_direct:
            changing = (CHANGES,) * (len(tensors) + 1)
            self._submit = self._launch.bind(True, True, (*changing, *self._numbers))
            self._stream = triton.runtime.driver.active.get_current_stream
        with chips.device_guard(tensors[0]):
            if self._submit is not None and aligned and not launches_observed():
                addresses = (tensor.data_ptr() for tensor in tensors)
                self._submit(self._stream(self._index), *addresses, position)
                return
            self._launch.by_triton((*tensors, position, *self._numbers), aligned)


def _strides(buffer: Tensor) -> tuple[int, int, int]:
    """Distances of rows, tokens and heads."""
    return buffer.stride(0), buffer.stride(2), buffer.stride(1)


def _launch(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, wide: tuple[bool, ...]
) -> BoundLaunch:
    """The launch. Strides and capacity are runtime arguments, so that a buffer that grows compiles
    nothing. `wide` tells which of them have 64 bits."""
    batch, heads, _, head_size = keys.shape
    head_size_v = values.shape[3]
    padded, padded_v = triton.next_power_of_2(head_size), triton.next_power_of_2(head_size_v)
    block_h = max(1, _ELEMENTS_PER_PROGRAM // max(padded, padded_v))
    block_h = min(triton.next_power_of_2(heads), block_h)
    grid = (batch, triton.cdiv(heads, block_h), 1)
    constants: dict[str, Any] = {
        "BLOCK_SIZE": 1,
        "D": head_size,
        "DV": head_size_v,
        "D_PAD": padded,
        "DV_PAD": padded_v,
        "BLOCK_H": block_h,
        "VEC_K": vector_elements("key", key.transpose(1, 2)),
        "VEC_V": vector_elements("value", value.transpose(1, 2)),
        "VEC_KC": vector_elements("keys", keys.transpose(1, 2)),
        "VEC_VC": vector_elements("values", values.transpose(1, 2)),
        "num_warps": 4 if padded * block_h > 512 else 1,
        "enable_fp_fusion": True,
    }
    name = ("append rows", key.get_device(), key.dtype, grid, wide, *constants.values())
    found: BoundLaunch | None = LAUNCHES.get(name)
    if found is None:
        found = BoundLaunch(append_rows_kernel, grid, with_config(constants, WriteConfig))
        LAUNCHES.keep(name, found)
    return found
