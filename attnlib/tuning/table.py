"""A tuning table as data: measured parameters of backends, and a ranking of backends for each class
of layers.

    {"schema": 1, "chip": NAME, "provenance": {NAME: {...}},
     "parameters": {"triton": [LINE, ...]},
     "backends": [{"layer": {...as layer_class returns it...}, "ranking": ["triton", "flash_attn"],
                   "relative": {"triton": 1.0, "flash_attn": 1.13},
                   "microseconds": {CASE: {NAME: 12.5}}, "left_out": {NAME: reason},
                   "provenance": NAME}]}

`relative` is the geometric mean over the cases of a backend's time divided by that of the fastest
backend. Only the backend itself knows the form of its parameter lines (`attnlib.tuning.tuner`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlib.errors import ContractError
from attnlib.spec import LayerSpec
from attnlib.tuning.layers import layer_class

__all__ = ["SCHEMA", "Ranking", "Tuning", "parse_ranking", "parse_tuning"]

SCHEMA = 1
_AGAIN = "write the table again with attnlib tune"


@dataclass(frozen=True)
class Ranking:
    """Backends in measured order for one class of layers.

    Attributes:
        layer: the class, from `layer_class`.
        order: backend names, fastest first. Each passed the correctness check on every case.
        relative: name -> time divided by that of the fastest backend, at least 1.0.
        source: the table that holds it.
        chip: the chip that it was measured on, if that is another one; "" means this chip.
        block_size: the tokens per block that it was measured with, if the layer has another block
            size; 0 means the layer's own.
        kv_cache_dtype: the elements of the cache that it was measured with, if the layer has
            others; "" means the layer's own.
        classes: the number of measured classes with this order, if the class of the layer was not
            measured and all of them have it; 0 means that the class was measured.
    """

    layer: Mapping[str, Any]
    order: tuple[str, ...]
    relative: Mapping[str, float]
    source: str
    chip: str = ""
    block_size: int = 0
    kv_cache_dtype: str = ""
    classes: int = 0

    def message(self, name: str) -> str | None:
        """One line about a backend for selection reports; None if the table does not rank it."""
        if name not in self.order:
            return None
        means = [f"{self.kv_cache_dtype} caches"] if self.kv_cache_dtype else []
        means += [f"blocks of {self.block_size}"] if self.block_size else []
        measured_with = f" with {' and '.join(means)}" if means else ""
        measured_classes = (
            f"all {self.classes} measured classes" if self.classes > 1 else "the one measured class"
        )
        fastest = self.order[0]
        if name == fastest:
            where = "this chip"
            if self.chip:
                measured = "such an order" if self.classes else "a measurement of them"
                where = f"the {self.chip}, the nearest chip with {measured}"
            found = f"measured fastest of {', '.join(self.order)}"
            if self.classes:
                return (
                    f"{found} for {measured_classes} of layers{measured_with} on {where}; layers "
                    f"like this one were not measured: {self.source}"
                )
            return f"{found} for such layers{measured_with} on {where}: {self.source}"
        where = f" on the {self.chip}" if self.chip else ""
        if self.classes:
            return f"slower than {fastest} for {measured_classes} of layers{measured_with}{where}"
        return (
            f"measured at {self.relative[name]:.2f} x the time of {fastest}{measured_with}{where}"
        )


@dataclass(frozen=True, eq=False)
class Tuning:
    """The table of one chip.

    Attributes:
        source: the file that it was read from.
        chip: the chip that it was measured on.
        provenance: name -> description of the run that measured a line.
        parameters: backend name -> its lines, from `Tuner.table_lines`.
        rankings: one for each class of layers.
    """

    source: str
    chip: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    rankings: tuple[Ranking, ...] = ()

    def ranking(self, spec: LayerSpec) -> Ranking | None:
        """The ranking for layers like `spec`; None if the table has none."""
        layer = layer_class(spec)
        return next((ranking for ranking in self.rankings if ranking.layer == layer), None)


def parse_tuning(data: Any, source: str) -> Tuning:
    """A table from its JSON value.

    Args:
        data: the value.
        source: the file name, for messages.

    Raises:
        ContractError: not a table; the message names the file, the line and the problem.
    """
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise ContractError(
            f"tuning table {source} has schema {found!r} and this version reads {SCHEMA}; {_AGAIN}"
        )
    chip, provenance = data.get("chip"), data.get("provenance")
    parameters = {"triton": data["tiles"]} if "tiles" in data else data.get("parameters", {})
    lines = parameters.values() if isinstance(parameters, Mapping) else [None]
    if (
        not isinstance(chip, str)
        or not isinstance(provenance, Mapping)
        or not all(_has_lines(each) for each in (*lines, data.get("backends", [])))
    ):
        raise ContractError(
            f"tuning table {source} needs 'chip' (text), 'provenance' (an object), 'parameters' "
            f"(an object of lists) and 'backends' (a list of objects); {_AGAIN}"
        )
    rankings = []
    for index, line in enumerate(data.get("backends", [])):
        try:
            rankings.append(parse_ranking(line, source))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ContractError(
                f"tuning table {source}, backends[{index}]: {what}; correct it or {_AGAIN}"
            ) from None
    return Tuning(source, chip, provenance, parameters, tuple(rankings))


def _has_lines(lines: Any) -> bool:
    """Whether this is a list of lines, whose provenance is a name where it is given."""
    return isinstance(lines, list) and all(
        isinstance(line, Mapping) and isinstance(line.get("provenance", ""), str) for line in lines
    )


def parse_ranking(line: Mapping[str, Any], source: str) -> Ranking:
    """One line of a table's `backends`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: not such a line.
    """
    order, relative = line["ranking"], line["relative"]
    if (
        not isinstance(order, Sequence)
        or isinstance(order, str)
        or not order
        or not all(isinstance(name, str) for name in order)
    ):
        raise ValueError(f"ranking={order!r} must be a list of names, fastest first")
    if len(set(order)) < len(order):
        raise ValueError(f"ranking={order!r} names a backend twice")
    numbers = {name: float(relative[name]) for name in order}
    return Ranking(dict(line["layer"]), tuple(order), numbers, source)
