"""Sinks of query tokens (M22), added to results whose LSE is known."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import on_host
from attnlib.ops.torch.row_terms import score_dtype
from attnlib.ops.torch.softmax import add_sink

__all__ = ["adds_token_sinks"]

P = ParamSpec("P")

_STARTS = ("query_start_loc", "cu_seqlens_q")
"""Names of the argument with the first query token of each request."""


def adds_token_sinks(operation: Callable[P, None]) -> Callable[P, None]:
    """An attention operation that also takes `params` with sinks `[T, Hq]`.

    Args:
        operation: has the arguments `query`, `params`, `out` and `lse`, and lengths by one of the
            names in `_STARTS`.
    """
    signature = inspect.signature(operation)
    place = list(signature.parameters).index("params")

    @functools.wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        params: Any = args[place] if len(args) > place else kwargs["params"]
        if not params.has_token_sinks:
            operation(*args, **kwargs)
            return
        given = signature.bind(*args, **kwargs).arguments
        out, lse, query = given["out"], given.get("lse"), given["query"]
        # Kept in the dtype of the statistics, so that the result is rounded once.
        plain = torch.empty(out.shape, dtype=score_dtype(query), device=out.device)
        logs = torch.empty(out.shape[:2], dtype=plain.dtype, device=out.device)
        given |= {"params": replace(params, sinks=None), "out": plain, "lse": logs}
        operation(**given)  # type: ignore[call-arg]  # all arguments by name
        name = next(name for name in _STARTS if name in given)
        starts = on_host(given[name], given.get(f"{name}_cpu"))
        _write(params, plain, logs, out, lse, int(starts[-1]) if starts.numel() else 0)

    return run


def _write(
    params: AttentionParams,
    plain: Tensor,
    logs: Tensor,
    out: Tensor,
    lse: Tensor | None,
    rows: int,
) -> None:
    """Write the results of the first `rows` query tokens with their sinks, and clear the others."""
    assert params.sinks is not None  # the caller has checked
    empty = logs[:rows] == -torch.inf
    found, total = add_sink(plain[:rows], logs[:rows], params.sinks[:rows])
    out[:rows] = found.masked_fill_(empty.unsqueeze(-1), 0.0)
    out[rows:].zero_()
    if lse is not None:
        lse[:rows] = total
        lse[rows:].fill_(-torch.inf)
