"""Which backends compute the parts of a divided layer (X4).

A backend that attends to the keys of another sequence serves all parts. One for decoders only
serves rows of one token, whose causal mask hides nothing. `prefill:A,decode:B` names one for each
phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnlib.backends.composite import CompositeBackend
from attnlib.errors import UnsupportedConfigError
from attnlib.layer import Attention
from attnlib.parallel.local_spec import LocalForm
from attnlib.parallel.rows import limits_of_rows
from attnlib.selection.current import current_request
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["LayerParts", "Part", "choose_parts", "make_builders", "new_tokens_spec", "phases"]

Select = Callable[[AttentionSpec, Any], Any]


class Part(NamedTuple):
    """A spec and the backend for it, a class or a request."""

    spec: AttentionSpec
    backend: Any


class LayerParts(NamedTuple):
    """What a rank computes.

    Attributes:
        form: of `cached`.
        cached: its keys and tokens that are requests of their own, or whole requests of decodes.
        context: its keys and the requests of prefills; None if all tokens are requests.
        new: the new tokens of prefills; None where `context` is.
    """

    form: LocalForm
    cached: Part
    context: Part | None
    new: Part | None

    def make_layers(
        self, score_tensors: Any, arguments: dict[str, Any]
    ) -> tuple[Attention, Attention | None, Attention | None]:
        """The layers of the parts.

        Args:
            score_tensors: of `cached`.
            arguments: of every `Attention`.
        """
        cached = Attention(
            self.cached.spec,
            backend=self.cached.backend,
            score_tensors=score_tensors,
            **arguments,
        )
        if self.context is None or self.new is None:
            return cached, None, None
        context = cached
        if self.context != self.cached:
            context = Attention(self.context.spec, backend=self.context.backend, **arguments)
        return cached, context, Attention(self.new.spec, backend=self.new.backend, **arguments)


def new_tokens_spec(spec: AttentionSpec) -> AttentionSpec:
    """Of attention among the new tokens of prefills."""
    return spec.replace(has_alibi=False, has_sink=False, needs_lse=True, kv_sharing=False)


def make_builders(
    cached: Attention,
    context: Attention | None,
    new: Attention | None,
    limits: BatchLimits | None,
    arguments: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """The builders of the layers of `LayerParts.make_layers`.

    Args:
        cached, context, new: the layers.
        limits: the largest batch.
        arguments: of every builder.
    """
    by_row = limits_of_rows(limits, by_row=context is None)

    def builder(layer: Attention | None) -> Any:
        if layer is None:
            return None
        within = by_row if layer is cached else limits
        return layer.backend.make_builder(layer.spec, limits=within, **arguments)

    first = builder(cached)
    return first, first if context is cached else builder(context), builder(new)


def choose_parts(spec: AttentionSpec, form: LocalForm, backend: Any, select: Select) -> LayerParts:
    """Choose backends for a layer.

    Args:
        spec: of the layer, with the query heads of one rank.
        form: of its keys on a rank.
        backend: as in `Attention`.
        select: the backend for a spec and a request.

    Raises:
        UnsupportedConfigError: no backend serves rows of one token; with the reasons against them.
    """
    prefill = decode = backend
    rows, cached = form, _selected(form.spec, backend, select)
    if cached is None:
        prefill, decode = phases(backend)
        cached = _selected(form.spec, decode, select)
    if cached is None:
        rows = form.for_decoders()
        cached = Part(rows.spec, select(rows.spec, decode))
    context = new = None
    if not form.by_row:
        context = _selected(form.spec, prefill, select)
        new = _selected(new_tokens_spec(spec), prefill, select)
    if context is None or new is None:
        return LayerParts(rows, cached, None, None)
    return LayerParts(rows, cached, context, new)


def _selected(spec: AttentionSpec, backend: Any, select: Select) -> Part | None:
    try:
        return Part(spec, select(spec, backend))
    except UnsupportedConfigError:
        return None


def phases(backend: Any) -> tuple[Any, Any]:
    """The backends of prefills and of decodes that a request names; the request for a single
    one."""
    if isinstance(backend, type) and issubclass(backend, CompositeBackend):
        return backend.prefill_backend, backend.decode_backend
    request, given = current_request(backend)
    if request.roles != ("prefill", "decode"):
        return backend, backend
    first, second = (given.get(str(n)) or str(n) for n in (request.first, request.second))
    return first, second
