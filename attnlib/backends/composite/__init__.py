"""Composite backends: one backend for prefills and one for decodes,
`prefill:flash_attn,decode:triton`.

Both children read one cache. The builder splits the batch and each child builds its part; the impl
runs each child on its rows. The composite supports what both children support.
"""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from dataclasses import fields
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.composite.impl import CompositeImpl
from attnlib.backends.composite.metadata import CompositeMetadata, CompositeMetadataBuilder
from attnlib.cache.layout import LAYOUTS, negotiate_layout
from attnlib.capabilities import NOT_STATED, Capabilities, Reason, Sizes
from attnlib.device import DeviceInfo
from attnlib.errors import LayoutMismatchError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport

__all__ = ["CompositeBackend", "make_composite"]

Backend = type[AttentionBackend]


class CompositeBackend(AttentionBackend):
    """Base of all composites; `make_composite` creates the classes."""

    prefill_backend: ClassVar[Backend]
    decode_backend: ClassVar[Backend]
    builder_cls: ClassVar[type[CompositeMetadataBuilder]]
    impl_cls: ClassVar[type[CompositeImpl]]

    @classmethod
    def get_name(cls) -> str:
        return f"prefill:{cls.prefill_backend.get_name()},decode:{cls.decode_backend.get_name()}"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl_cls

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return CompositeMetadata

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder_cls

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """The reasons of both children; each names the child."""
        return [
            f"{child.get_name()}: {reason}"
            for child in (cls.prefill_backend, cls.decode_backend)
            for reason in child.unavailable(device)
        ]

    @classmethod
    def explain_lines(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """The backend of each phase, with the kernels that it names for this phase."""
        lines = []
        for phase, child in (("prefill", cls.prefill_backend), ("decode", cls.decode_backend)):
            parts = [line.partition(":") for line in child.explain_lines(spec, device)]
            kernels = [text.strip() for phases, _, text in parts if phase in phases]
            details = f" ({'; '.join(kernels)})" if kernels else ""
            lines.append(f"{f'{phase}:':<8} {child.get_name()}{details}")
        return lines

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """The reasons of both children, and unpaged attention types, which have no decodes."""
        reasons: list[str] = [
            Reason.prefixed(child.get_name(), reason)
            for child in (cls.prefill_backend, cls.decode_backend)
            for reason in child.validate_configuration(spec, device)
        ]
        return (
            reasons
            if spec.is_paged
            else [
                *reasons,
                f"attn_type={spec.attn_type.value} has no decode phase: choose a single backend",
            ]
        )


class _CompositeMeta(ABCMeta):
    """Metaclass of composites, which are created at run time and pickled by their children."""


class _CompositePartMeta(ABCMeta):
    """Metaclass of the impl and builder classes of composites, pickled as parts of these."""


# Weak values: a composite of configured classes is freed when it is no longer used.
_composites: WeakValueDictionary[tuple[Backend, Backend], Backend] = WeakValueDictionary()


def make_composite(prefill: Backend, decode: Backend) -> Backend:
    """The backend that uses `prefill` for prefills and `decode` for decodes.

    Equal arguments return the same class. If both are one backend, that backend is returned.

    Raises:
        LayoutMismatchError: the two have no common cache layout.
    """
    if prefill is decode:
        return prefill
    found = _composites.get((prefill, decode))
    if found is None:
        capabilities = _common(prefill, decode)
        children = {"prefill_backend": prefill, "decode_backend": decode, "__module__": __name__}
        builder = {
            **children,
            "cudagraph_support": capabilities.cudagraph,
            "needs_host_lengths": any(
                child.get_builder_cls().needs_host_lengths for child in (prefill, decode)
            ),
        }
        body = {
            **children,
            "description": f"prefills with {prefill.get_name()}, decodes with {decode.get_name()}",
            "capabilities": capabilities,
            "builder_cls": _CompositePartMeta(
                "CompositeMetadataBuilder", (CompositeMetadataBuilder,), builder
            ),
            "impl_cls": _CompositePartMeta("CompositeImpl", (CompositeImpl,), children),
        }
        found = cast(Backend, _CompositeMeta("CompositeBackend", (CompositeBackend,), body))
        _composites[prefill, decode] = found
    return found


def _reduce(cls: Any) -> tuple[Any, ...]:
    return make_composite, (cls.prefill_backend, cls.decode_backend)


def _reduce_part(cls: Any) -> tuple[Any, ...]:
    name = "impl_cls" if issubclass(cls, CompositeImpl) else "builder_cls"
    return getattr, (make_composite(cls.prefill_backend, cls.decode_backend), name)


copyreg.pickle(_CompositeMeta, _reduce)
copyreg.pickle(_CompositePartMeta, _reduce_part)


def _common(prefill: Backend, decode: Backend) -> Capabilities:
    """The capabilities that both declare.

    Sets of sizes cannot be intersected in general: those of `decode` are used, and
    `supports_combination` checks both children.
    """
    first, second = prefill.capabilities, decode.capabilities
    layouts = _layouts(prefill, decode)
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(Capabilities)):
        values[name] = _both(getattr(first, name), getattr(second, name))
    values.update(
        kv_cache_layouts=layouts,
        attn_types=tuple(
            t
            for t in values["attn_types"] or ()
            if t in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        ),
        min_capability=max(
            (c for c in (first.min_capability, second.min_capability) if c), default=None
        ),
        max_capability=min(
            (c for c in (first.max_capability, second.max_capability) if c), default=None
        ),
        needs_finite_cache=first.needs_finite_cache or second.needs_finite_cache,
        allocates_in_forward=first.allocates_in_forward or second.allocates_in_forward,
        batch_invariant=False,
        key_selection=False,  # lists are not split between the children
        # A graph would fix where a mixed batch is split; a uniform batch belongs to one child.
        cudagraph=min(
            first.cudagraph or CudaGraphSupport.NEVER,
            second.cudagraph or CudaGraphSupport.NEVER,
            CudaGraphSupport.UNIFORM_BATCH,
        ),
    )
    return Capabilities(**values)


def _both(first: Any, second: Any) -> Any:
    if first is NOT_STATED or second is NOT_STATED:
        return NOT_STATED
    if isinstance(first, bool):
        return first and second
    if isinstance(first, tuple) and isinstance(second, tuple) and not isinstance(first, Sizes):
        return tuple(value for value in first if value in second)
    return second


def _layouts(prefill: Backend, decode: Backend) -> tuple[str, ...]:
    requirements = [
        (child.get_name(), child.capabilities.kv_cache_layouts or ("NHD",))
        for child in (prefill, decode)
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
