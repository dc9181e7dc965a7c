"""What divided layers would run, or why they are refused, without a process group."""

from __future__ import annotations

from typing import Any

from attnlib.device import resolve_device
from attnlib.errors import UnsupportedConfigError
from attnlib.parallel.divisions import Division
from attnlib.parallel.exchange import choose_exchange, exchange_bytes
from attnlib.parallel.layer_parts import LayerParts, Part, choose_parts, phases
from attnlib.parallel.local_spec import LocalForm, local_form
from attnlib.parallel.setup_checks import check_division, tries_memory
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
    AttentionSpec.check_kind(spec, "explain_parallel")
    check_division(division)
    head = f"divided keys: {division}"
    try:
        form = local_form(spec, division, 0)
    except UnsupportedConfigError as error:
        return "\n".join([head, *(f"  refused   {reason}" for reason in error.reasons)])
    received = exchange_bytes(spec, division.world_size, 1)
    chosen = choose_exchange(spec, division.world_size).value
    by_memory = "peer_memory, or " if tries_memory(spec, resolve_device(device).type) else ""
    parts = _parts(spec, form, backend, device)
    by_row = form.by_row if parts is None else parts.context is None
    rows = "each new token is a request" if by_row else "requests as they are"
    lines = [
        head,
        f"  queries   {form.spec.num_heads} heads, {rows}; the first visible key is found by "
        f"{form.edge.value}",
        f"  exchange  {by_memory}{chosen}: {received['queries']} bytes of queries and "
        f"{received[chosen]} of results per new token and layer",
    ]
    if parts is None:  # what the weakest demand meets
        shown = {"keys of a rank": Part(form.for_decoders().spec, phases(backend)[1])}
    else:
        shown = {"keys of a rank": parts.cached}
        if parts.context is not None and parts.new is not None:
            if parts.context != parts.cached:
                shown["context of prefills"] = parts.context
            shown["new tokens of prefills"] = parts.new
    for name, part in shown.items():
        report = str(explain(part.spec, device, backend=part.backend))
        lines += [f"  {name}:", *(f"    {line}" for line in report.splitlines())]
    return "\n".join(lines)


def _parts(spec: AttentionSpec, form: LocalForm, backend: Any, device: Any) -> LayerParts | None:
    """The parts with requests instead of backends; None if no backend serves the keys."""

    def select(part: AttentionSpec, request: Any) -> Any:
        if explain(part, device, backend=request).chosen is None:
            raise UnsupportedConfigError("no backend", reasons=[])
        return request

    try:
        return choose_parts(spec, form, backend, select)
    except UnsupportedConfigError:
        return None
