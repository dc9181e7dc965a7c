"""A decode step that has been served once, ready to be served again: cache write and attention in a handful of launches.

Between the layers of one step only addresses change. `settle` is asked after a call of `write_kv` and `paged_decode` and
gathers the launches that these two made; the `DecodeStep` that it returns repeats them for other tensors, without working
out again what they follow from. It holds the tensors of the batch, so their addresses stay theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlib.ops.triton import launch as launching
from attnlib.ops.triton.arguments import Options
from attnlib.ops.triton.cache_write import find_write
from attnlib.ops.triton.launch import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.paged_decode import find_decode

__all__ = ["DecodeBatch", "DecodeStep", "settle"]


@dataclass(frozen=True)
class DecodeBatch:
    """What the layers of a step share.

    Attributes:
        slot_mapping, block_table, query_start_loc, seq_lens: as `write_kv` and `paged_decode` take them.
        max_query_len, max_seq_len: likewise.
        workspace: likewise.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    workspace: Tensor | None


class DecodeStep:
    """The launches of one kind of call; calls must agree with the first one in dtypes, shapes, strides and devices.

    Args:
        batch: the batch of the call.
        options: its options; scales of the cache are 1.
        write: what `find_write` found.
        decode: what `find_decode` found.
    """

    __slots__ = ("_addresses", "_batch", "_bound", "_fast", "_index", "_plain", "_scale", "_write", "_write_tail")

    def __init__(self, batch: DecodeBatch, options: Options, write: Any, decode: Any) -> None:
        slots, table, starts, lens = batch.slot_mapping, batch.block_table, batch.query_start_loc, batch.seq_lens
        self._batch = batch  # keeps the memory behind the addresses
        self._addresses = (table.data_ptr(), starts.data_ptr(), lens.data_ptr(), 0 if batch.workspace is None else batch.workspace.data_ptr())
        self._write: BoundLaunch = write.write
        self._write_tail = (slots.data_ptr(), 1.0, 1.0, *write.numbers)
        self._fast, self._plain = decode.fast, None if decode.fast is not None else decode.plain
        self._index: int = write.index
        self._scale = float(options.scale)
        self._bound: tuple[BoundLaunch, ...] = (write.write, *self._attending())

    def _attending(self) -> tuple[BoundLaunch, ...]:
        if self._fast is not None:
            return self._fast.attend, self._fast.join
        return (self._plain.attend,) if self._plain.combine is None else (self._plain.attend, self._plain.combine)

    @property
    def is_ready(self) -> bool:
        """Whether every launch can be repeated directly."""
        return all(launch.is_direct for launch in self._bound)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, sinks: Tensor | None, out: Tensor) -> bool:
        """Write and attend; False, and nothing launched, where these addresses, this device or the launchers' state want the usual way."""
        asked, written, keys, values = query.data_ptr(), out.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        new_keys, new_values = key.data_ptr(), value.data_ptr()
        if (asked | written | keys | values | new_keys | new_values | self._addresses[3]) & ALIGNMENT:
            return False
        index = self._index
        if torch.cuda.current_device() != index or not launching.undisturbed():
            return False
        fast = self._fast
        if fast is not None:
            maps = fast.encoded.find(fast.attend, keys, values)
            if maps is None:
                return False
        self._write.go((new_keys, new_values, keys, values, *self._write_tail), index)
        sink = None if sinks is None else sinks.data_ptr()
        table, starts, lens, partials = self._addresses
        if fast is not None:
            lses, pieces = partials + 4 * fast.lses, partials + 4 * fast.pieces
            fast.attend.go((*maps, asked, written, None, sink, starts, lens, table, partials, lses, pieces, self._scale, *fast.numbers), index)
            fast.join.go((partials, lses, pieces, starts, sink, written, None, *fast.join_numbers), index)
            return True
        plain = self._plain
        work = None if plain.combine is None else partials
        plain.attend.go((
            asked, keys, values, written, None, starts, lens, None, None, sink, None, 1.0, 1.0, *plain.numbers, table, plain.table_stride,
            work, *plain.last,
        ), index)  # fmt: skip
        if plain.combine is not None:
            plain.combine.go((work, sink, written, None, *plain.combine_numbers), index)
        return True


def settle(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: DecodeBatch, options: Options, kernels: str
) -> DecodeStep | None:
    """The step that repeats a call just made; None where it cannot be repeated directly.

    Args:
        query, key, value: of the call.
        key_cache, value_cache: likewise.
        batch: likewise.
        options: likewise, without LSE, ALiBi and query bias, with one causality and with scales of 1.
        kernels: likewise.
    """
    write = find_write(key, value, key_cache, value_cache, batch.slot_mapping)
    decode = find_decode(
        query, key_cache, value_cache, batch.block_table, batch.query_start_loc, batch.seq_lens, options, batch.max_query_len,
        batch.max_seq_len, kernels,
    )  # fmt: skip
    if write is None or write.write is None or write.as_bytes or decode is None or (decode.fast is None and decode.plain is None):
        return None
    if decode.plain is not None and decode.plain.as_bytes:
        return None
    needs = decode.fast.num_bytes if decode.fast is not None else 4 * decode.plain.partial_floats if decode.plain.combine is not None else 0
    if needs and (batch.workspace is None or batch.workspace.nbytes < needs):
        return None
    step = DecodeStep(batch, options, write, decode)
    return step if step.is_ready else None
