"""What divided layers would run, or why they are refused, without a process group."""

from __future__ import annotations

from typing import Any

from attnlib.errors import UnsupportedConfigError
from attnlib.parallel.divisions import Division
from attnlib.parallel.exchange import choose_exchange, exchange_bytes
from attnlib.parallel.local_spec import local_form
from attnlib.selection import explain
from attnlib.spec import AttentionSpec

__all__ = ["explain_parallel"]


def explain_parallel(
    spec: AttentionSpec, division: Division, *, backend: Any = None, device: Any = None
) -> str:
    """The form of a rank's part, every backend with its reasons against it, and the exchange.

    Args:
        spec: of the layer, with the query heads of one rank.
        division: of the positions.
        backend, device: as in `attnlib.explain`.
    """
    head = f"divided keys: {division}"
    try:
        form = local_form(spec, division, 0)
    except UnsupportedConfigError as error:
        return "\n".join([head, *(f"  refused   {reason}" for reason in error.reasons)])
    received = exchange_bytes(spec, division.world_size, 1)
    chosen = choose_exchange(spec, division.world_size).value
    rows = "each new token is a request" if form.by_row else "requests as they are"
    lines = [
        head,
        f"  queries   {form.spec.num_heads} heads, {rows}; the first visible key is found by "
        f"{form.edge.value}",
        f"  exchange  {chosen}: {received['queries']} bytes of queries and {received[chosen]} of "
        "results per new token and layer",
        "  keys of a rank:",
    ]
    report = str(explain(form.spec, device, backend=backend))
    return "\n".join([*lines, *(f"    {line}" for line in report.splitlines())])
