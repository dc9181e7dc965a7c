"""Checks of one field of a spec against what a backend declares, for all kinds of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnlib.capabilities.declaration import NOT_STATED
from attnlib.sizes import Sizes
from attnlib.spec import CudaGraphSupport, LayerSpec

__all__ = ["Check", "Reason", "check_cudagraph", "flag", "member", "not_stated"]

Check = Callable[[Any, Any], "str | None"]
"""(spec, capabilities) -> why they do not fit, or None."""


class Reason(str):
    """Why a backend does not support a spec, in words, with the field of the spec.

    Attributes:
        field: name of the field of the spec; None if the reason is about no single field.
    """

    field: str | None

    def __new__(cls, text: str, field: str | None) -> Reason:
        reason = super().__new__(cls, text)
        reason.field = field
        return reason

    @classmethod
    def prefixed(cls, label: str, reason: str) -> Reason:
        """`label: reason`, about the same field."""
        return cls(f"{label}: {reason}", getattr(reason, "field", None))

    def __getnewargs__(self) -> tuple[str, str | None]:  # type: ignore[override]  # str has one
        return str(self), self.field


def not_stated(name: str) -> str:
    """The reason for a capability that is not stated."""
    return f"{name}: not stated by this backend, so not assumed"


def _join(values: Any) -> str:
    return (
        ", ".join(str(getattr(value, "value", value)).removeprefix("torch.") for value in values)
        or "none"
    )


def flag(name: str, needed: Callable[[Any], object], phrase: str) -> Check:
    """Check of a feature that is on or off: unsupported if it is needed and not stated as True."""

    def check(spec: Any, caps: Any) -> str | None:
        value = getattr(caps, name)
        if not needed(spec) or value is True:
            return None
        return (
            not_stated(name)
            if value is NOT_STATED
            else f"{phrase.format(spec=spec)}: not supported"
        )

    return check


def member(name: str, get: Callable[[Any], Any], label: str) -> Check:
    """Check of a value that must be one of the stated ones."""

    def check(spec: Any, caps: Any) -> str | None:
        allowed, value = getattr(caps, name), get(spec)
        if allowed is NOT_STATED:
            return not_stated(name)
        if value in allowed:
            return None
        limit = str(allowed) if isinstance(allowed, Sizes) else _join(allowed)
        return f"{label}={_join([value])} not supported (supported: {limit})"

    return check


def check_cudagraph(spec: LayerSpec, caps: Any) -> str | None:
    """Check of the batches that a CUDA graph must be able to capture."""
    if spec.cudagraph is CudaGraphSupport.NEVER:
        return None
    if caps.cudagraph is NOT_STATED:
        return not_stated("cudagraph")
    if spec.cudagraph <= caps.cudagraph:
        return None
    return f"cudagraph={spec.cudagraph.name} not supported (up to {caps.cudagraph.name})"
