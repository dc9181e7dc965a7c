"""`LayerSpec`, what the specifications of all kinds of layers have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from attnlib.errors import ContractError
from attnlib.spec.kinds import CudaGraphSupport

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["LayerSpec"]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A specification as a value: hashable, comparable, picklable, with a short text.

    A subclass sets its derived fields in `__post_init__`, checks them, and calls `_freeze`.
    """

    if TYPE_CHECKING:  # each kind of layer describes these fields of its own
        dtype: torch.dtype
        batch_invariant: bool
        cudagraph: CudaGraphSupport

    kind: ClassVar[str]
    """What the layer is, in a word, for messages."""

    def _freeze(self) -> None:
        # The spec is part of the key of the selection cache, and hashing all fields is slow.
        value = hash(tuple(getattr(self, field.name) for field in fields(self)))
        object.__setattr__(self, "_hash", value)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]  # set by `_freeze`

    def __reduce__(self) -> tuple[Any, ...]:
        # String hashes differ between processes, so the hash must not be pickled.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, (type(self), values)

    def __str__(self) -> str:
        """The fields that differ from their defaults, for messages."""
        derived = self._derived()
        shown = [
            f"{field.name}={_text(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != derived.get(field.name, field.default)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _derived(self) -> dict[str, Any]:
        """Fields whose default follows from other fields, with that default."""
        return {}

    @classmethod
    def check_kind(cls, spec: object, user: str) -> None:
        """Whether `spec` is of this class.

        Raises:
            ContractError: it is another object; names its `user`.
        """
        if isinstance(spec, cls):
            return
        advice = (
            "Attention and PagedKVCache take an AttentionSpec, StateLayer and StateCache a "
            "StateSpec"
        )
        if isinstance(getattr(spec, "spec", None), cls):
            advice = "pass its attribute `spec`"
        raise ContractError(
            f"{user} takes an attnlib.{cls.__name__}, and spec is a {type(spec).__name__}: {advice}"
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; validated again."""
        return replace(self, **changes)


def _text(value: Any) -> str:
    if isinstance(value, CudaGraphSupport):
        return value.name
    return str(value.value) if isinstance(value, Enum) else str(value)


def _rebuild(cls: type[LayerSpec], values: dict[str, Any]) -> LayerSpec:
    return cls(**values)
