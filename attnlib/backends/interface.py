"""Check a backend class against the interface, when it is registered or requested."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from attnlib.backends.base import AttentionBackend, AttentionImpl, StateImpl
from attnlib.capabilities import NOT_STATED, Capabilities, StateCapabilities
from attnlib.errors import RegistrationError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder

__all__ = [
    "check_backend_class",
    "check_backend_interface",
    "serves_attention",
    "serves_states",
]

Backend = type[AttentionBackend]

_REQUIRED = ("get_name", "get_impl_cls")
_WITHOUT_ARGUMENTS = (*_REQUIRED, "get_builder_cls", "get_metadata_cls", "get_state_cls")
_FORWARD_PARAMETERS = ("self", "query", "cache", "metadata", "output", "lse")
_BUILD_PARAMETERS = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")


def check_backend_class(backend: Any, label: str) -> None:
    """Check the class itself, without calling its methods.

    Args:
        backend: the object to check.
        label: the name or path it was given by, for messages.

    Raises:
        RegistrationError: it is not a backend class; the message names what is missing.
    """
    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise RegistrationError(
            f"backend {label!r} is {backend!r}; it must be a subclass of attnlib.AttentionBackend"
        )
    if not isinstance(backend.state_capabilities, StateCapabilities):
        raise RegistrationError(
            f"backend {label!r}: state_capabilities is {backend.state_capabilities!r}; it must be "
            f"an attnlib.StateCapabilities(...)"
        )
    undefined = [name for name in _REQUIRED if _is_abstract(backend, name)]
    if "get_impl_cls" in undefined and serves_states(backend):
        undefined.remove("get_impl_cls")
    if undefined:
        raise RegistrationError(
            f"backend {label!r} ({backend.__qualname__}) lacks {', '.join(undefined)}: define "
            f"{'it' if len(undefined) == 1 else 'each'} as a class method or static method"
        )
    if bound := [name for name in _WITHOUT_ARGUMENTS if _takes_an_instance(backend, name)]:
        raise RegistrationError(
            f"backend {label!r} ({backend.__qualname__}): {bound[0]} takes an instance, and no "
            "instance is made: decorate it with @staticmethod or @classmethod"
        )
    if not isinstance(backend.capabilities, Capabilities):
        raise RegistrationError(
            f"backend {label!r}: capabilities is {backend.capabilities!r}; it must be an "
            f"attnlib.Capabilities(...)"
        )


def serves_states(backend: Backend) -> bool:
    """Whether a backend declares state layers."""
    declared = getattr(backend.state_capabilities, "devices", NOT_STATED)
    return declared is not NOT_STATED


def serves_attention(backend: Backend) -> bool:
    """Whether a backend has an impl of attention layers."""
    return not _is_abstract(backend, "get_impl_cls")


def _is_abstract(backend: Backend, name: str) -> bool:
    return getattr(getattr(backend, name), "__isabstractmethod__", False)


def _takes_an_instance(backend: Backend, name: str) -> bool:
    method = inspect.getattr_static(backend, name)
    return inspect.isfunction(method) and len(inspect.signature(method).parameters) > 0


def check_backend_interface(backend: Backend, label: str) -> None:
    """`check_backend_class`, then its impl, builder and metadata classes.

    If importing those classes fails, they are not checked: selection reports the import error. The
    classes of attnlib itself are not imported.

    Raises:
        RegistrationError: a class does not fit; shows both signatures if `forward` or `build`
            differs.
    """
    check_backend_class(backend, label)
    if backend.__module__.startswith("attnlib.backends."):
        return
    if serves_states(backend):
        _check_state_impl(backend, label)
    if not serves_attention(backend):
        return
    try:
        impl, metadata = backend.get_impl_cls(), backend.get_metadata_cls()
        builder = backend.get_builder_cls()
    except Exception:
        return
    _check_impl(impl, label)
    _check_builder(builder, label)
    if not isinstance(metadata, type) or not issubclass(metadata, AttentionMetadata):
        raise RegistrationError(
            f"backend {label!r}: get_metadata_cls() returned {metadata!r}; it must be a subclass "
            f"of attnlib.AttentionMetadata and a dataclass"
        )


def _check_state_impl(backend: Backend, label: str) -> None:
    try:
        impl: Any = backend.get_state_impl_cls()
    except UnsupportedConfigError as error:
        raise RegistrationError(f"backend {label!r}: {error}") from None
    except Exception:
        return
    if not isinstance(impl, type) or not issubclass(impl, StateImpl) or inspect.isabstract(impl):
        raise RegistrationError(
            f"backend {label!r}: get_state_impl_cls() returned {impl!r}; it must return a subclass "
            f"of attnlib.StateImpl that implements step and convolve"
        )


def _check_impl(impl: Any, label: str) -> None:
    if not isinstance(impl, type) or not issubclass(impl, AttentionImpl):
        raise RegistrationError(
            f"backend {label!r}: get_impl_cls() returned {impl!r}; it must return a subclass of "
            f"attnlib.AttentionImpl"
        )
    if getattr(impl.forward, "__isabstractmethod__", False):
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__} does not implement forward"
        )
    names = tuple(inspect.signature(impl.forward).parameters)
    if names[1:2] == ("layer",) or "num_heads" in inspect.signature(impl).parameters:
        raise RegistrationError(
            f"backend {label!r}: {impl.__qualname__} has vLLM's constructor or forward; register "
            f"attnlib.compat.vllm.adapt_backend(...) of the class instead"
        )
    _check_parameters(impl, AttentionImpl.forward, _FORWARD_PARAMETERS, label)


def _check_builder(builder: Any, label: str) -> None:
    if not isinstance(builder, type) or not issubclass(builder, AttentionMetadataBuilder):
        raise RegistrationError(
            f"backend {label!r}: get_builder_cls() returned {builder!r}; it must return a subclass "
            f"of attnlib.AttentionMetadataBuilder"
        )
    if builder.checks_batches:  # those of other interfaces are called in their own way
        _check_parameters(builder, AttentionMetadataBuilder.build, _BUILD_PARAMETERS, label)


def _check_parameters(
    cls: type, expected: Callable[..., Any], names: tuple[str, ...], label: str
) -> None:
    """Whether the method of a class in place of `expected` takes its parameters, by place and by
    name, or any."""
    signature = inspect.signature(getattr(cls, expected.__name__))
    found = signature.parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found)
    by_place = tuple(p.name for p in found if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if by_place[: len(names)] != names and not takes_any:
        raise RegistrationError(
            f"backend {label!r}: {cls.__qualname__}.{expected.__name__}{signature} does not fit; "
            f"attnlib calls {expected.__name__}{inspect.signature(expected)}: keep names and order"
        )
