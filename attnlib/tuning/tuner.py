"""The optional interface through which `attnlib tune` measures a backend's launch parameters.

A backend returns a `Tuner` from `AttentionBackend.tuner(device)`. `attnlib.tuning.measure` runs
every candidate, checks its output, times it, and writes the fastest one to the table of the chip.
The backend reads the table back with `tuning_for(device).parameters[name]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from attnlib.bench.case import BenchCase
    from attnlib.bench.inputs import CaseInputs

__all__ = ["Best", "Parameters", "Tuner"]

Parameters = Mapping[str, Any]
"""One candidate: parameter names and values that JSON can hold."""


@dataclass(frozen=True)
class Best:
    """The result for one group of cases.

    Attributes:
        parameters: the chosen candidate.
        measured: case name -> `{"us": time of it, "before_us": time of the current parameters}`.
    """

    parameters: Parameters
    measured: Mapping[str, Mapping[str, float]]


class Tuner(ABC):
    """Tunable operations of one backend on one device.

    Attributes:
        operations: names of the operations, as `attnlib tune --ops` takes them.
    """

    operations: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def group(self, case: BenchCase, operation: str) -> Hashable | None:
        """The group of cases that share one set of parameters.

        Returns:
            A key, a string unless `table_lines` is overridden; None if `operation` does not serve
            `case`.
        """

    @abstractmethod
    def candidates(self, case: BenchCase, operation: str) -> Sequence[Parameters]:
        """Distinct candidates for `case`.

        The first one is in use now, and the others have to beat it.
        """

    @abstractmethod
    def bind(
        self, inputs: CaseInputs, operation: str, parameters: Parameters
    ) -> AbstractContextManager[Callable[[int], object]]:
        """A context in which `operation` uses `parameters`.

        Leaving the context restores the previous parameters.

        Args:
            inputs: query, caches, metadata and output of the case.
            operation: one of `operations`.
            parameters: one of `candidates`.

        Returns:
            A context manager of `call(i)`, which computes attention over `inputs.caches[i]` into
            `inputs.output`. The call must be capturable by a CUDA graph. It may raise if the device
            cannot run the candidate.
        """

    def table_lines(self, best: Mapping[Any, Best], provenance: str) -> list[dict[str, Any]]:
        """Lines for the table of the chip, one per group by default.

        Args:
            best: group -> result, for the groups that were measured.
            provenance: the name of this run; every line must carry it as `"provenance"`.
        """
        return [
            {
                "group": group,
                "parameters": dict(result.parameters),
                "measured": dict(result.measured),
                "provenance": provenance,
            }
            for group, result in best.items()
        ]

    def line_key(self, line: Mapping[str, Any]) -> Hashable:
        """The key of a table line: a new measurement replaces all older lines with an equal key."""
        key: Hashable = line["group"]
        return key
