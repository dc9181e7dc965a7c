"""Cascades: prefixes that several requests share are computed once, `prefix:NAME,suffix:NAME`.

The queries of all requests of a prefix attend to it in one pass; each request attends to the rest
of its keys; the partial results are merged by their log-sum-exps. Source: Hydragen (Juravsky et
al., 2024) and cascade inference (Ye et al., FlashInfer, 2024).
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

from attnlib.backends._pairs.capabilities import common_capabilities
from attnlib.backends._pairs.classes import make_pair
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.cascade.builder import CascadeMetadataBuilder
from attnlib.backends.cascade.impl import CascadeImpl
from attnlib.backends.cascade.metadata import CascadeMetadata, prefix_spec
from attnlib.backends.cascade.schedule import DEFAULT_RULE, PrefixRule, not_shared_reason
from attnlib.capabilities import Reason
from attnlib.device import DeviceInfo
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.spec import AttentionSpec

__all__ = ["CascadeBackend", "make_cascade"]

Backend = type[AttentionBackend]


class CascadeBackend(AttentionBackend):
    """Base of all cascades; `make_cascade` creates the classes."""

    prefix_backend: ClassVar[Backend]
    suffix_backend: ClassVar[Backend]
    rule: ClassVar[PrefixRule]
    builder_cls: ClassVar[type[CascadeMetadataBuilder]]
    impl_cls: ClassVar[type[CascadeImpl]]

    @classmethod
    def get_name(cls) -> str:
        return f"prefix:{cls.prefix_backend.get_name()},suffix:{cls.suffix_backend.get_name()}"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl_cls

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return CascadeMetadata

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder_cls

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """The reasons of both backends; each names the backend."""
        return [
            f"{child.get_name()}: {reason}"
            for child in dict.fromkeys((cls.prefix_backend, cls.suffix_backend))
            for reason in child.unavailable(device)
        ]

    @classmethod
    def explain_lines(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Why prefixes are not shared, or the two backends; then the lines of the suffix
        backend."""
        reason = not_shared_reason(spec)
        shared = (
            f"shared prefixes: computed once by {cls.prefix_backend.get_name()}"
            if reason is None
            else f"shared prefixes: computed by each request; {reason}"
        )
        return [shared, *cls.suffix_backend.explain_lines(spec, device)]

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """The reasons of both backends. Both return log-sum-exps where prefixes are shared."""
        needs = [(cls.suffix_backend, cls.suffix_backend.get_name(), spec)]
        if not_shared_reason(spec) is None:
            spec = spec.replace(needs_lse=True)
            label = f"{cls.prefix_backend.get_name()} for prefixes"
            needs = [(*needs[0][:2], spec), (cls.prefix_backend, label, prefix_spec(spec))]
        return [
            Reason.prefixed(label, reason)
            for backend, label, needed in needs
            for reason in backend.validate_configuration(needed, device)
        ]


_OF_SUFFIX = (
    "sliding_window",
    "attention_chunks",
    "alibi",
    "sink",
    "score_function",
    "mask_kinds",
    "cudagraph",
)
"""Capabilities of a cascade that are those of its suffix backend."""

# Weak values: a cascade of configured classes is freed when it is no longer used.
_cascades: WeakValueDictionary[tuple[Backend, Backend, PrefixRule], Backend] = WeakValueDictionary()


def make_cascade(prefix: Backend, suffix: Backend, rule: PrefixRule = DEFAULT_RULE) -> Backend:
    """The backend that uses `prefix` for shared prefixes and `suffix` for everything else.

    Equal arguments return the same class. Both may be one backend.

    Args:
        prefix, suffix: the backends.
        rule: which prefixes are computed once.

    Raises:
        LayoutMismatchError: the two have no common cache layout.
    """
    found = _cascades.get((prefix, suffix, rule))
    if found is None:
        children = {
            "prefix_backend": prefix,
            "suffix_backend": suffix,
            "rule": rule,
            "__module__": __name__,
        }
        capabilities = common_capabilities(
            prefix,
            suffix,
            # Layers that share no prefix need these from the suffix backend only.
            **{name: getattr(suffix.capabilities, name) for name in _OF_SUFFIX},
        )
        builder = suffix.get_builder_cls()
        parts = {
            "cudagraph_support": builder.cudagraph_support,
            "reorder_batch_threshold": builder.reorder_batch_threshold,
            "needs_host_lengths": builder.needs_host_lengths,
        }
        body = {
            **children,
            "description": f"shared prefixes with {prefix.get_name()}, the rest with "
            f"{suffix.get_name()}",
            "capabilities": capabilities,
        }
        found = make_pair(
            CascadeBackend,
            body,
            (make_cascade, (prefix, suffix, rule)),
            builder=(CascadeMetadataBuilder, {**children, **parts}),
            impl=(CascadeImpl, children),
        )
        _cascades[prefix, suffix, rule] = found
    return found
