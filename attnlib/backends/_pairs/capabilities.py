"""Capabilities of two backends that serve one layer over one cache."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from attnlib.backends.base import AttentionBackend
from attnlib.cache.layout import LAYOUTS, negotiate_layout
from attnlib.capabilities import NOT_STATED, Capabilities, Sizes
from attnlib.errors import LayoutMismatchError
from attnlib.spec import AttentionType

__all__ = ["common_capabilities"]

Backend = type[AttentionBackend]


def common_capabilities(first: Backend, second: Backend, **changes: Any) -> Capabilities:
    """The capabilities that both declare.

    Sets of sizes cannot be intersected in general: those of `second` are used, and
    `supports_combination` of the pair checks both backends.

    Args:
        first, second: the backends.
        changes: capabilities of the pair that do not follow from these two.

    Raises:
        LayoutMismatchError: the two have no common cache layout.
    """
    one, two = first.capabilities, second.capabilities
    values: dict[str, Any] = {
        field.name: _both(getattr(one, field.name), getattr(two, field.name))
        for field in fields(Capabilities)
    }
    values.update(
        kv_cache_layouts=_layouts(first, second),
        attn_types=tuple(
            t
            for t in values["attn_types"] or ()
            if t in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        ),
        min_capability=max(
            (c for c in (one.min_capability, two.min_capability) if c), default=None
        ),
        max_capability=min(
            (c for c in (one.max_capability, two.max_capability) if c), default=None
        ),
        needs_finite_cache=one.needs_finite_cache or two.needs_finite_cache,
        least_product=max(one.least_product, two.least_product),
        allocates_in_forward=one.allocates_in_forward or two.allocates_in_forward,
        rotary_write=False,
        batch_invariant=False,
        query_tensors=False,  # nor the rows of sinks
        token_sinks=False,
        key_selection=False,  # lists are not split between the backends
        compressed_entries=False,
    )
    values.update(changes)
    return Capabilities(**values)


def _both(first: Any, second: Any) -> Any:
    if first is NOT_STATED or second is NOT_STATED:
        return NOT_STATED
    if isinstance(first, bool):
        return first and second
    if isinstance(first, tuple) and isinstance(second, tuple) and not isinstance(first, Sizes):
        return tuple(value for value in first if value in second)
    return second


def _layouts(first: Backend, second: Backend) -> tuple[str, ...]:
    requirements = [
        (child.get_name(), child.capabilities.kv_cache_layouts or ("NHD",))
        for child in (first, second)
    ]
    best = negotiate_layout(requirements)  # raises if there is none
    rest = []
    for name in LAYOUTS:
        try:
            negotiate_layout(requirements, name)
        except LayoutMismatchError:
            continue
        rest.append(name)
    return (best, *(name for name in rest if name != best))
