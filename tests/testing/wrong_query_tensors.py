"""Backends that read the tensors or sinks of other query tokens; check S6 detects each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.ops.params import AttentionParams
from attnlib.score_functions.query_tensors import QUERY_ROW, QueryTensors


class _Changed(TorchImpl):
    """Changes the tensors of a call."""

    def change(self, given: QueryTensors) -> QueryTensors:
        return given

    def of_call(self, given: QueryTensors) -> AttentionImpl:
        return super().of_call(self.change(given))


class IgnoresSinks(_Changed):
    """Attends without the sinks."""

    def change(self, given: QueryTensors) -> QueryTensors:
        if given.sinks is None:
            return given
        return replace(given, sinks=torch.full_like(given.sinks, -torch.inf))


class SinksOfTheFirstToken(_Changed):
    """Reads the sinks of the first token for all, as those of a layer."""

    def change(self, given: QueryTensors) -> QueryTensors:
        sinks = given.sinks
        return given if sinks is None else replace(given, sinks=sinks[:1].expand_as(sinks))


class SinksOfTheNextToken(_Changed):
    """Reads one row too far."""

    def change(self, given: QueryTensors) -> QueryTensors:
        return given if given.sinks is None else replace(given, sinks=given.sinks.roll(-1, 0))


class SinksOfHeadsInReverse(_Changed):
    """Reads the sinks of other heads."""

    def change(self, given: QueryTensors) -> QueryTensors:
        return given if given.sinks is None else replace(given, sinks=given.sinks.flip(1))


class RoundsTensors(_Changed):
    """Rounds the tensors to bfloat16."""

    def change(self, given: QueryTensors) -> QueryTensors:
        rounded = {
            name: x.bfloat16().to(x.dtype) if x.is_floating_point() else x
            for name, x in given.tensors.items()
        }
        return replace(given, tensors=rounded)


class KeepsTheFirstTensors(_Changed):
    """Keeps the tensors of the first call, as a plan that stores their addresses."""

    def change(self, given: QueryTensors) -> QueryTensors:
        kept: QueryTensors = self.__dict__.setdefault("_kept", given)
        return kept


class SinksOfThePrefillFromRowZero(TorchImpl):
    """Does not skip the rows of the decodes in front of the prefills."""

    def attention_params(self, metadata: Any, cache: Any = None) -> AttentionParams:
        params = super().attention_params(metadata, cache)
        return _Whole(**{name: getattr(params, name) for name in params.__dataclass_fields__})


class _Whole(AttentionParams):
    def of_rows(self, rows: slice) -> AttentionParams:
        return super().of_rows(slice(0, None))


class _Rows(TorchImpl):
    """Changes the rows of queries."""

    def rows(self, table: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def attention_params(self, metadata: Any, cache: Any = None) -> AttentionParams:
        params = super().attention_params(metadata, cache)
        tensors = dict(params.score_tensors)
        if QUERY_ROW in tensors:
            tensors[QUERY_ROW] = self.rows(tensors[QUERY_ROW])
        return replace(params, score_tensors=tensors)


class RowsOfPositions(_Rows):
    """Takes the position of a query for its row."""

    def rows(self, table: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(table)


class RowsOfTheFirstRequest(_Rows):
    """Reads the rows of the first request for all requests of a part."""

    def rows(self, table: torch.Tensor) -> torch.Tensor:
        return table[:1].expand_as(table).contiguous()


def _torch_with(impl: type[TorchImpl]) -> type[AttentionBackend]:
    return type(impl.__name__, (TorchBackend,), {"get_impl_cls": staticmethod(lambda: impl)})


WRONG_QUERY_TENSORS: dict[str, tuple[type[AttentionBackend], str]] = {
    f"query tensors: {name}": (_torch_with(impl), "S6")
    for name, impl in {
        "no sinks": IgnoresSinks,
        "one sink for all tokens": SinksOfTheFirstToken,
        "sink of the next token": SinksOfTheNextToken,
        "sinks of other heads": SinksOfHeadsInReverse,
        "sinks of the prefill from row 0": SinksOfThePrefillFromRowZero,
        "rounded": RoundsTensors,
        "of the first call": KeepsTheFirstTensors,
        "row is the position": RowsOfPositions,
        "rows of the first request": RowsOfTheFirstRequest,
    }.items()
}
