"""A decode step that has been served once, ready to be served again: cache write and attention in a handful of launches.

Between the layers of one step only addresses change. `settle` is asked after a call of `write_kv` and `paged_decode` and
gathers the launches that these two made; what it returns repeats them for other tensors, without working
out again what they follow from. Kernels get addresses, which costs less than tensors do, so whatever a launch looks at in
a tensor is looked at here: that the batch's tensors lie where they lay, and that all addresses are aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from attnlib.ops.triton.cache_write import find_write
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch import bound as launching
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.signature import Options
from attnlib.ops.triton.paged_decode import find_decode

__all__ = ["DecodeBatch", "Repeat", "settle"]


@dataclass(frozen=True)
class DecodeBatch:
    """What the layers of a step share.

    Attributes:
        slot_mapping, block_table, query_start_loc, seq_lens: as `write_kv` and `paged_decode` take them.
        max_query_len, max_seq_len: likewise.
        workspace, counters: likewise.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    workspace: Tensor | None
    counters: Tensor | None


Repeat = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], bool]
"""A step served again for (query, key, value, key_cache, value_cache, sinks, out), which agree with those of the first call
in dtypes, shapes, strides and devices, sinks excepted. False, and nothing is launched, where addresses, the device or the
state of Triton want the usual way."""


def settle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: DecodeBatch,
    options: Options,
    kernels: str,
) -> Repeat | None:
    """What repeats a call just made; None where it cannot be repeated directly.

    Args:
        query, key, value: of the call.
        key_cache, value_cache: likewise.
        batch: likewise.
        options: likewise, without LSE, ALiBi and query bias, with one causality and with scales of 1.
        kernels: likewise.
    """
    write = find_write(key, value, key_cache, value_cache, batch.slot_mapping)
    decode: Any = find_decode(
        query, key_cache, value_cache, batch.block_table, batch.query_start_loc, batch.seq_lens, options, batch.max_query_len,
        batch.max_seq_len, batch.counters, kernels,
    )  # fmt: skip
    if (
        write is None
        or write.write is None
        or decode is None
        or (decode.fast is None and decode.plain is None)
    ):
        return None
    needs = (
        decode.fast.num_bytes
        if decode.fast is not None
        else 4 * decode.plain.partial_floats
        if decode.plain.combine is not None
        else 0
    )
    if needs and (
        batch.workspace is None
        or batch.workspace.nbytes < needs
        or batch.workspace.data_ptr() & ALIGNMENT
    ):
        return None
    return (
        _repeat(batch, options, write, decode)
        if all(launch.is_direct for launch in _launches(write, decode))
        else None
    )


def _repeat(batch: DecodeBatch, options: Options, write: Any, decode: Any) -> Repeat:
    """Bound once: where the batch's tensors lie, and everything that the launches take but the addresses of a layer's own tensors."""
    slots, table, starts, lens = (
        batch.slot_mapping,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
    )
    # Any tensor where there is none: what lies there is not read then.
    space, counters = (
        slots if tensor is None else tensor for tensor in (batch.workspace, batch.counters)
    )
    index, stream_of, sinks_like = write.index, write.write.stream, _facts(options.sinks)
    hooks = [launch.hooks for launch in _launches(write, decode)]

    def lie() -> tuple[Any, ...]:
        return (
            slots.data_ptr(), table.data_ptr(), starts.data_ptr(), lens.data_ptr(), space.data_ptr(), counters.data_ptr(),
            slots.nbytes, table.stride(), starts.nbytes, lens.nbytes, space.nbytes, counters.nbytes,
        )  # fmt: skip

    lay = lie()
    store = write.write.ending(lay[0], 1.0, 1.0, *write.numbers)
    find: Callable[..., tuple[Any, ...] | None]
    if decode.fast is not None:
        find, attend = (
            partial(decode.fast.encoded.find, decode.fast.attend),
            _fast(lay, decode.fast, float(options.scale)),
        )
    else:
        find, attend = _no_maps, _plain(lay, decode.plain)

    def repeat(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        sinks: Tensor | None,
        out: Tensor,
    ) -> bool:
        asked, written, keys, values = (
            query.data_ptr(),
            out.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
        )
        new_keys, new_values = key.data_ptr(), value.data_ptr()
        if (
            asked | written | keys | values | new_keys | new_values
        ) & ALIGNMENT or chips.current_device() != index:
            return False
        if (
            any(hooks)
            or not launching.undisturbed()
            or (sinks_like is not None and _facts(sinks) != sinks_like)
        ):
            return False
        if lie() != lay or (maps := find(keys, values)) is None:
            return False
        stream = stream_of(index)
        store(stream, new_keys, new_values, keys, values)
        attend(
            stream, maps, asked, keys, values, written, None if sinks is None else sinks.data_ptr()
        )
        return True

    return repeat


def _launches(write: Any, decode: Any) -> tuple[BoundLaunch, ...]:
    """The kernels of a step, in order."""
    if decode.fast is not None:
        return (
            (write.write, decode.fast.attend)
            if decode.fast.join is None
            else (write.write, decode.fast.attend, decode.fast.join)
        )
    return (
        (write.write, decode.plain.attend)
        if decode.plain.combine is None
        else (write.write, decode.plain.attend, decode.plain.combine)
    )


def _facts(sinks: Tensor | None) -> tuple[Any, ...] | None:
    """What a launch follows from; layers that are alike in everything else may have sinks of their own making."""
    return None if sinks is None else (sinks.dtype, sinks.shape, sinks.stride(), sinks.get_device())


def _no_maps(keys: int, values: int) -> tuple[Any, ...]:
    return ()


def _fast(lay: tuple[Any, ...], launch: Any, scale: float) -> Callable[..., None]:
    """The one or two launches of `HopperDecode.serve`."""
    _, table, starts, lens, partials, counters = lay[:6]
    lses, pieces = partials + 4 * launch.lses, partials + 4 * launch.pieces
    attend = launch.attend.ending(
        starts,
        lens,
        table,
        partials,
        lses,
        pieces,
        counters if launch.join is None else None,
        scale,
        *launch.numbers,
    )
    join = None if launch.join is None else launch.join.ending(None, *launch.join_numbers)

    def run(
        stream: int,
        maps: tuple[Any, ...],
        asked: int,
        keys: int,
        values: int,
        written: int,
        sink: int | None,
    ) -> None:
        attend(stream, *maps, asked, written, None, sink)
        if join is not None:
            join(stream, partials, lses, pieces, starts, sink, written)

    return run


def _plain(lay: tuple[Any, ...], launch: Any) -> Callable[..., None]:
    """The one or two launches of the portable kernels."""
    _, table, starts, lens, space = lay[:5]
    partials = None if launch.combine is None else space
    attend = launch.attend.ending(
        None, 1.0, 1.0, *launch.numbers, table, launch.table_stride, partials, *launch.last
    )
    combine = (
        None if launch.combine is None else launch.combine.ending(None, *launch.combine_numbers)
    )

    def run(
        stream: int,
        maps: tuple[Any, ...],
        asked: int,
        keys: int,
        values: int,
        written: int,
        sink: int | None,
    ) -> None:
        attend(stream, asked, keys, values, written, None, starts, lens, None, None, sink)
        if combine is not None:
            combine(stream, partials, sink, written)

    return run
