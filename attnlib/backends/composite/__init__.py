"""Composite backends: one backend for prefills and one for decodes,
`prefill:flash_attn,decode:triton`.

Both children read one cache. The builder splits the batch and each child builds its part; the impl
runs each child on its rows. The composite supports what both children support.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

from attnlib.backends._pairs.capabilities import common_capabilities
from attnlib.backends._pairs.classes import make_pair
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.composite.impl import CompositeImpl
from attnlib.backends.composite.metadata import CompositeMetadata, CompositeMetadataBuilder
from attnlib.capabilities import Reason
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec, CudaGraphSupport

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
        support = (backend.capabilities.cudagraph for backend in (prefill, decode))
        capabilities = common_capabilities(
            prefill,
            decode,
            # A graph would fix where a mixed batch is split; a uniform batch belongs to one child.
            cudagraph=min(
                *(level or CudaGraphSupport.NEVER for level in support),
                CudaGraphSupport.UNIFORM_BATCH,
            ),
        )
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
        }
        found = make_pair(
            CompositeBackend,
            body,
            (make_composite, (prefill, decode)),
            builder=(CompositeMetadataBuilder, builder),
            impl=(CompositeImpl, children),
        )
        _composites[prefill, decode] = found
    return found
