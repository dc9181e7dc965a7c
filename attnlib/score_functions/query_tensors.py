"""Tensors that a layer call passes for each of its query tokens (M21, M22).

They differ from layer to layer and from step to step, like the queries. A score function finds the
row of its query by the batch tensor `query_row`, which the builder of the metadata makes:

    def token_bias(score, q_pos, k_pos, head, request, aux):
        row = query_row(aux.query_row, request, q_pos)
        return score + lookup(aux.bias, row, head)

    function = ScoreFunction(token_bias, query_tensors=("bias",))
    layer(q, k, v, cache, metadata, query_tensors=QueryTensors({"bias": bias}))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.score_functions.operators import lookup

if TYPE_CHECKING:
    from attnlib.score_functions.function import ScoreFunction

__all__ = ["QUERY_ROW", "QueryTensors", "query_row", "query_row_tensor"]

QUERY_ROW = "query_row"
"""Name of the batch tensor that every function with query tensors has."""


def query_row(table: Any, request: Any, q_pos: Any) -> Any:
    """The row of a query in the query tensors, in a score function.

    Args:
        table: `aux.query_row`.
        request, q_pos: as given to the score function.
    """
    return q_pos + lookup(table, request, 0)


def query_row_tensor(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """The batch tensor `query_row` `[R, 1]` int32: the row of a request's position 0, which its
    context has not. No synchronization.

    Args:
        query_start_loc, seq_lens: `[R + 1]` and `[R]` int32 of the batch.
    """
    return (query_start_loc[1:] - seq_lens).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class QueryTensors:
    """The tensors of the query tokens of one layer call.

    Attributes:
        tensors: the query tensors of the score function by name (M21): `[T, m]` with one row per
            query token, contiguous, int32 or floating point of 16 or 32 bits. Rows past the tokens
            of the batch are not read.
        sinks: `[T, Hq]` sink logits (M22), contiguous, of a floating-point dtype; None for none.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    sinks: Tensor | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Names, dtypes, shapes, strides and devices of the tensors."""
        given = (*self.tensors.items(), ("sinks", self.sinks))
        return tuple(
            None if x is None else (name, x.dtype, x.shape, x.stride(), x.device)
            for name, x in given
        )

    def check(
        self,
        function: ScoreFunction | None,
        sink_heads: int | None,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """Check names, shapes, dtypes and devices; values are not read.

        Args:
            function: the score function of the layer.
            sink_heads: Hq of a layer with a sink per query token and head; None for others.
            num_tokens: query tokens of the batch, without padding.
            device: of the query.

        Raises:
            ContractError: the message names the tensor, what it is and what it must be.
        """
        names = () if function is None else function.query_tensors
        if unknown := sorted(set(self.tensors) - set(names)):
            raise ContractError(
                f"query tensor {unknown[0]!r} is given, and score function {function} reads "
                f"{', '.join(names) or 'none'}: pass only these",
                rule="M21",
            )
        if function is not None:
            function.check_tensors(self.tensors, names, "query")
        self._check_sinks(sink_heads)
        for name, tensor in (*self.tensors.items(), ("sinks", self.sinks)):
            if tensor is None:
                continue
            if tensor.shape[0] < num_tokens:
                raise ContractError(
                    f"query tensor {name!r} has {tensor.shape[0]} rows, but the batch has "
                    f"{num_tokens} tokens: pass one row for each",
                    rule="M21",
                )
            if tensor.device != device:
                raise ContractError(
                    f"query tensor {name!r} is on {tensor.device}, query on {device}: move it to "
                    "the device of the layer",
                    rule="M21",
                )

    def _check_sinks(self, sink_heads: int | None) -> None:
        sinks = self.sinks
        if (sinks is None) != (sink_heads is None):
            given = "missing" if sinks is None else "given"
            raise ContractError(
                f"sinks of the query tokens are {given}, but the spec says "
                f"token_sinks={sink_heads is not None}: pass QueryTensors(sinks=...) exactly when "
                "the spec has token_sinks",
                rule="M22",
            )
        if sinks is None:
            return
        if sinks.dim() != 2 or sinks.shape[1] != sink_heads or not sinks.is_floating_point():
            raise ContractError(
                f"sinks of the query tokens are {sinks.dtype} {tuple(sinks.shape)}; they must be "
                f"floating-point [tokens, {sink_heads}], one per token and query head",
                rule="M22",
            )
        if not sinks.is_contiguous():
            raise ContractError(
                f"sinks of the query tokens have strides {sinks.stride()}; call .contiguous()",
                rule="M22",
            )
