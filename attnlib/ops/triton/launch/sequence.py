"""The launches of one call: what each of them takes from the call, and all of them in one C call.

A prepared launch (`CacheWrite`, `PlainAttention`, `HopperDecode`, ...) holds no addresses. In the
list of a kernel's arguments, a `Source` stands for each value that a call or its batch gives.
`Launches` fills them in Python, for launches by Triton and for single calls of an operation. For
step plans `sequence.c` fills them: `prepare_sequence` makes a template once per call signature,
which each batch binds to its own values, and each layer runs with its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import triton

from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch import driver
from attnlib.ops.triton.launch.bound import BoundLaunch, Submit, launches_observed
from attnlib.ops.triton.launch.driver import Source

__all__ = [
    "KEY",
    "KEY_CACHE",
    "KEY_MAP",
    "K_SCALE",
    "LSE",
    "NUM_VALUES",
    "OUT",
    "QUERY",
    "QUERY_MAP",
    "SINKS",
    "SLOPES",
    "VALUE",
    "VALUE_CACHE",
    "VALUE_MAP",
    "V_SCALE",
    "Launches",
    "Lookup",
    "Part",
    "Source",
    "Step",
    "batch_sources",
    "bind_step",
    "prepare_sequence",
    "score_sources",
]


QUERY, KEY_CACHE, VALUE_CACHE, OUT, LSE, KEY, VALUE, SLOPES, SINKS, K_SCALE, V_SCALE = map(
    Source, range(11)
)
"""The values of a call by their indices. Tensors of a score function follow (`score_sources`)."""
NUM_VALUES = V_SCALE + 1
"""Values of a call without a score function."""
KEY_MAP, VALUE_MAP, QUERY_MAP = map(Source, (-1, -2, -3))
"""Encoded TMA descriptors."""
_FIRST_OF_BATCH = 1 << 10
"""The first value of a batch; each prepared launch numbers those that it takes."""

_ALIGNED = {QUERY, KEY_CACHE, VALUE_CACHE, OUT, KEY, VALUE}
"""Sources whose alignment Triton specializes kernels on."""
_UNUSED, _ANY, _MULTIPLE_OF_16 = range(3)
_CONSTANT, _BATCH_VALUE = -1, -2
"""Indices of `sequence.c`."""


def score_sources(count: int) -> tuple[Source, ...]:
    """The first `count` layer tensors of a score function."""
    return tuple(Source(NUM_VALUES + number) for number in range(count))


def batch_sources(count: int, first: int = 0) -> tuple[Source, ...]:
    """`count` values of a batch, from the `first`-th value on that a prepared launch takes."""
    start = _FIRST_OF_BATCH + first
    return tuple(map(Source, range(start, start + count)))


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


class Launches(NamedTuple):
    """Launches without the values of a call and of its batch.

    Attributes:
        steps: the launches in order.
        lookups: descriptors that they take.
    """

    steps: tuple[Step, ...]
    lookups: tuple[Lookup, ...] = ()

    def calls(
        self, values: Sequence[Any], of_batch: Sequence[Any] = ()
    ) -> Iterator[tuple[Submit, list[Any]]]:
        """The launches for these values, with their changing arguments: addresses and numbers for
        direct launches, tensors and numbers for launches by Triton.

        Args:
            values: of the call, in the order of the sources.
            of_batch: of the batch, in the order of `batch_sources`.
        """
        given: dict[int, Any] = dict(enumerate(values))
        given.update(enumerate(of_batch, _FIRST_OF_BATCH))
        for sources, table, encode, gives in self.lookups:
            addresses = tuple([values[source] for source in sources])
            key = addresses if len(addresses) > 1 else addresses[0]
            given.update(zip(gives, table.get(key) or encode(*addresses), strict=True))
        for submit, sources in self.steps:
            yield submit, [given[source] for source in sources]

    def submit(self, stream: int, values: Sequence[Any], of_batch: Sequence[Any] = ()) -> None:
        """Launch on `stream`; see `calls` for the values."""
        for submit, changing in self.calls(values, of_batch):
            submit(stream, *changing)


class Part(NamedTuple):
    """Launches as a part of a sequence.

    Attributes:
        launches: direct launches.
        offsets: bytes to add to the addresses of some sources.
        first: number of the part's first value among the values of the batch.
    """

    launches: Launches
    offsets: dict[Source, int] = {}  # noqa: RUF012  # never changed
    first: int = 0


def bind_step(launch: BoundLaunch, direct: bool, aligned: bool, arguments: tuple[Any, ...]) -> Step:
    """Bind a kernel to its arguments (`BoundLaunch.bind`); note which ones a call gives."""
    sources = [argument for argument in arguments if type(argument) is Source]
    return Step(launch.bind(direct, aligned, arguments), tuple(sources))


def prepare_sequence(
    parts: Sequence[Part],
    index: int,
    num_values: int,
    fixed: dict[Source, Any],
    num_batch_values: int = 0,
    aligned: Collection[Source] = _ALIGNED,
) -> Any:
    """A template of direct launches. `template.bind(values)` makes a function of it.

    `values` is a tuple of `num_batch_values` addresses, numbers and None. The function
    `run(*tensors)` launches on the current stream. It returns False and launches nothing where an
    address is not aligned, another device is current, or launches are observed. Both are C
    functions.

    `run.compare(torch.is_grad_enabled, like)` makes `check(*values)` of it, which calls `run` with
    the values if they are like those of an earlier call, else returns False and launches nothing
    (`check.c`). `like` has the values of that call. For a tensor, a value must have its type,
    dtype, shape, strides and device; for None it must be None; for `...` it may be any tensor or
    None. Values behind those of `run` must also have equal addresses, and are not passed on. None
    where this torch has no C interface to compare tensors; `attnlib.ops.signature.tensor_check`
    compares them then.

    Args:
        parts: launches in order.
        index: the device index.
        num_values: values of a call.
        fixed: values that do not change. The others are the tensors that `run` takes, in the order
            of the sources, as tensors or None.
        num_batch_values: values of a batch, of all parts.
        aligned: tensors whose addresses must be multiples of 16.
    """
    template = _Template(num_values, fixed, aligned)
    for part in parts:
        template.add(part)
    functions = (
        chips.current_device,
        triton.runtime.driver.active.get_current_stream,
        launches_observed,
    )
    lists = (bytes(template.roles), tuple(template.lookups), tuple(template.steps))
    return driver.compile_native().Template(functions, index, *lists, num_batch_values)


class _Template:
    """Where each argument of each launch comes from, as `sequence.c` reads it.

    Attributes:
        roles: of each given tensor: whether its address must be a multiple of 16.
        lookups: the descriptors, by the tensors whose addresses they are found by.
        steps: the launches, each with the origin of every argument that a call gives.
    """

    def __init__(
        self, num_values: int, fixed: dict[Source, Any], aligned: Collection[Source]
    ) -> None:
        given = [number for number in range(num_values) if number not in fixed]
        self._numbers: dict[int, int] = {source: number for number, source in enumerate(given)}
        self._fixed, self._aligned = fixed, aligned
        self._num_found = 0
        self.roles = bytearray(len(given))
        self.lookups: list[tuple[Any, ...]] = []
        self.steps: list[tuple[Any, ...]] = []

    def add(self, part: Part) -> None:
        """Add the launches of a part. One loop: every new form of a call passes through it."""
        numbers, fixed, roles = self._numbers, self._fixed, self.roles
        launches, offsets, first = part
        maps: dict[Source, int] = {}
        for sources, table, encode, gives in launches.lookups:
            keys = tuple((numbers[source], offsets.get(source, 0)) for source in sources)
            for source in sources:
                roles[numbers[source]] = _MULTIPLE_OF_16 if source in self._aligned else _ANY
            self.lookups.append((keys, table, encode, len(gives)))
            for source in gives:
                maps[source] = len(numbers) + self._num_found
                self._num_found += 1
        for submit, sources in launches.steps:
            uses: list[tuple[int, Any]] = []
            for source in sources:
                if source >= _FIRST_OF_BATCH:
                    uses.append((_BATCH_VALUE - first - (source - _FIRST_OF_BATCH), 0))
                elif source in fixed:
                    uses.append((_CONSTANT, fixed[source]))
                elif source in maps:
                    uses.append((maps[source], 0))
                else:
                    number = numbers[source]
                    roles[number] = _MULTIPLE_OF_16 if source in self._aligned else _ANY
                    uses.append((number, offsets.get(source, 0)))
            self.steps.append((submit, tuple(uses)))
