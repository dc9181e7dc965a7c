"""The launches of one call: what each of them takes from the call, and all of them in one C call.

A prepared launch is bound to a batch (`bind` of `CacheWrite`, `PlainAttention`, `HopperDecode`,
...), which leaves the tensors of a layer open. In the list of a kernel's arguments, a `Source`
stands for each of them. `BoundLaunches` fills them in Python, for launches by Triton and for single
calls of an operation. `bind_sequence` fills them in C (`sequence.c`), for step plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton

from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch import driver
from attnlib.ops.triton.launch.bound import BoundLaunch, Submit, launches_observed
from attnlib.ops.triton.launch.driver import Source

__all__ = [
    "KEY", "KEY_CACHE", "KEY_MAP", "K_SCALE", "LSE", "NUM_VALUES", "OUT", "QUERY", "QUERY_MAP",
    "SINKS", "SLOPES", "VALUE", "VALUE_CACHE", "VALUE_MAP", "V_SCALE", "BoundLaunches", "Lookup",
    "Source", "Step", "bind_check", "bind_sequence", "bind_step", "score_sources",
]  # fmt: skip


QUERY, KEY_CACHE, VALUE_CACHE, OUT, LSE, KEY, VALUE, SLOPES, SINKS, K_SCALE, V_SCALE = map(
    Source, range(11)
)
"""The values of a call by their indices. Tensors of a score function follow (`score_sources`)."""
NUM_VALUES = V_SCALE + 1
"""Values of a call without a score function."""
KEY_MAP, VALUE_MAP, QUERY_MAP = map(Source, (-1, -2, -3))
"""Encoded TMA descriptors."""

_ALIGNED = {QUERY, KEY_CACHE, VALUE_CACHE, OUT, KEY, VALUE}
"""Sources whose alignment Triton specializes kernels on."""
_UNUSED, _ANY, _MULTIPLE_OF_16 = range(3)


def score_sources(count: int) -> tuple[Source, ...]:
    """The first `count` layer tensors of a score function."""
    return tuple(Source(NUM_VALUES + number) for number in range(count))


class Step(NamedTuple):
    """One launch of a call.

    Attributes:
        submit: `submit(stream, *changing)`.
        sources: what `changing` is.
    """

    submit: Submit
    sources: tuple[Source, ...]


class Lookup(NamedTuple):
    """Encoded descriptors by the addresses of one or two tensors.

    Attributes:
        sources: the tensors.
        table: tuples of descriptors by address, or by tuple of two addresses.
        encode: the descriptors that `table` lacks, by the addresses.
        gives: which descriptors they are.
    """

    sources: tuple[Source, ...]
    table: dict[Any, tuple[Any, ...]]
    encode: Callable[..., tuple[Any, ...]]
    gives: tuple[Source, ...]


class BoundLaunches(NamedTuple):
    """Launches over one batch, ready to run for any layer.

    Attributes:
        steps: the launches in order.
        lookups: descriptors that they take.
        kept: tensors of which the launches hold addresses, if nothing else keeps them alive.
    """

    steps: tuple[Step, ...]
    lookups: tuple[Lookup, ...] = ()
    kept: tuple[Any, ...] = ()

    def calls(self, values: Sequence[Any]) -> Iterator[tuple[Submit, list[Any]]]:
        """The launches for these values of a call, with their changing arguments.

        Args:
            values: in the order of the sources: addresses and numbers for direct launches, tensors
                and numbers for launches by Triton.
        """
        given: dict[int, Any] = dict(enumerate(values))
        for sources, table, encode, gives in self.lookups:
            addresses = tuple(values[source] for source in sources)
            key = addresses if len(addresses) > 1 else addresses[0]
            given.update(zip(gives, table.get(key) or encode(*addresses), strict=True))
        for submit, sources in self.steps:
            yield submit, [given[source] for source in sources]

    def run(self, stream: int, values: Sequence[Any]) -> None:
        """Launch on `stream`, for the values of a call as in `calls`."""
        for submit, changing in self.calls(values):
            submit(stream, *changing)


def bind_step(launch: BoundLaunch, direct: bool, aligned: bool, arguments: tuple[Any, ...]) -> Step:
    """Bind a kernel to its arguments (`BoundLaunch.bind`); note which ones a call gives."""
    sources = [argument for argument in arguments if type(argument) is Source]
    return Step(launch.bind(direct, aligned, arguments), tuple(sources))


def bind_sequence(
    parts: Sequence[tuple[BoundLaunches, dict[Source, int]]],
    index: int,
    num_values: int,
    fixed: dict[Source, Any],
) -> Callable[..., bool]:
    """Bind direct launches to `run(*tensors)`, a C function that launches them all.

    It launches on the current stream. It returns False and launches nothing where an address is
    not aligned, another device is current, or launches are observed.

    Args:
        parts: launches in order; each with the bytes to add to addresses of some sources.
        index: the device index.
        num_values: values of a call.
        fixed: values that do not change. The others are the tensors that `run` takes, in the order
            of the sources, as tensors or None.
    """
    given = [number for number in range(num_values) if number not in fixed]
    numbers: dict[int, int] = {source: number for number, source in enumerate(given)}
    roles, num_found = bytearray(len(given)), 0
    lookups: list[tuple[Any, ...]] = []
    steps: list[tuple[Any, ...]] = []
    for bound, offsets in parts:
        maps: dict[Source, int] = {}
        for sources, table, encode, gives in bound.lookups:
            keys = []
            for source in sources:
                number = numbers[source]
                roles[number] = _MULTIPLE_OF_16 if source in _ALIGNED else _ANY
                keys.append((number, offsets.get(source, 0)))
            lookups.append((tuple(keys), table, encode, len(gives)))
            for source in gives:
                maps[source] = len(given) + num_found
                num_found += 1
        for submit, sources in bound.steps:
            uses: list[tuple[int, Any]] = []
            for source in sources:
                if source in fixed:
                    uses.append((-1, fixed[source]))
                elif source in maps:
                    uses.append((maps[source], 0))
                else:
                    number = numbers[source]
                    roles[number] = _MULTIPLE_OF_16 if source in _ALIGNED else _ANY
                    uses.append((number, offsets.get(source, 0)))
            steps.append((submit, tuple(uses)))
    functions = (
        chips.current_device, triton.runtime.driver.active.get_current_stream, launches_observed
    )  # fmt: skip
    run: Callable[..., bool] = driver.compile_native().Sequence(
        functions, index, bytes(roles), tuple(lookups), tuple(steps)
    )
    return run


def bind_check(run: Callable[..., bool], like: tuple[Any, ...]) -> Callable[..., bool] | None:
    """`check(*values)`: calls `run` with the values if they are like those of an earlier call,
    else it returns False and launches nothing. A C function (`check.c`). None where this torch has
    no C interface to compare tensors; `attnlib.ops.signature.tensor_check` compares them then.

    Args:
        run: of `bind_sequence`.
        like: the values of that call. For a tensor, a value must have its type, dtype, shape,
            strides and device; for None it must be None; for `...` it may be any tensor or None.
            Values behind those of `run` must also have equal addresses, and are not passed on.
    """
    native = driver.compile_native()
    if not isinstance(run, native.Sequence) or not driver.can_compare():
        return None
    found: Callable[..., bool] = native.Check(run, torch.is_grad_enabled, like)
    return found
