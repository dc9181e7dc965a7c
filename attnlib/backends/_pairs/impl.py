"""The attention of one layer on two backends over one cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl, check_in_place
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.base import AttentionMetadata
from attnlib.spec import AttentionSpec

__all__ = ["PairImpl", "PairPlan", "attend"]


class PairImpl(AttentionImpl):
    """Base of the impls of pairs. A child is an impl in an attribute; one of them writes the cache.

    A subclass names the attributes and fills them with `make_child` in its constructor.
    """

    child_names: ClassVar[tuple[str, ...]]
    """Attributes of the children."""
    reading_names: ClassVar[tuple[str, ...]]
    """Those whose children read slopes, sinks and score tensors of the layer."""
    writing_name: ClassVar[str]
    """That of the child that writes the cache."""

    def make_child(
        self, backend: type[AttentionBackend], spec: AttentionSpec, settings: dict[str, Any]
    ) -> AttentionImpl:
        """The impl of one of the two backends.

        Args:
            backend: the backend, with its own configuration.
            spec: requirements of its part.
            settings: keyword arguments of this impl's constructor.
        """
        own = {name: value for name, value in settings.items() if name != "config"}
        return backend.get_impl_cls()(spec, config=backend.config, **own)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "scale":
            for child in self._children():
                child.scale = value
        elif name == "write_rotation":
            getattr(self, self.writing_name).write_rotation = value

    def _children(self, names: tuple[str, ...] | None = None) -> list[AttentionImpl]:
        """The children that exist: none while `AttentionImpl.__init__` runs."""
        names = self.child_names if names is None else names
        return [self.__dict__[name] for name in names if name in self.__dict__]

    def set_block_size(self, block_size: int) -> None:
        """See `AttentionImpl.set_block_size`."""
        super().set_block_size(block_size)
        for child in self._children():
            child.set_block_size(block_size)

    def read_per_head_tensors_from(self, owner: Any) -> None:
        """See `AttentionImpl.read_per_head_tensors_from`; children read from `owner`, too."""
        super().read_per_head_tensors_from(owner)
        for child in self._children(self.reading_names):
            child.read_per_head_tensors_from(owner)

    @property
    def rotates_writes(self) -> bool:
        """See `AttentionImpl.rotates_writes`: as the child that writes."""
        writer: AttentionImpl = getattr(self, self.writing_name)
        return writer.rotates_writes

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`."""
        writer: AttentionImpl = getattr(self, self.writing_name)
        writer.write_kv(key, value, cache, slot_mapping)


class PairPlan:
    """Base of the plans of pairs.

    Args:
        spec: of the layers.
        slot_mapping: `[T]` int64; None where nothing is written.
    """

    def __init__(self, spec: AttentionSpec, slot_mapping: torch.Tensor | None) -> None:
        self._spec = spec
        self._slot_mapping = slot_mapping

    def per_head(
        self, query: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat or per-head queries and outputs as `[T, Hq, D]` and `[T, Hq, Dv]`."""
        spec = self._spec
        return (
            query.view(-1, spec.num_heads, spec.head_size),
            output.view(-1, spec.num_heads, spec.head_size_v),
        )

    def write(
        self,
        impl: AttentionImpl,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
    ) -> None:
        """Write new keys and values, flat or per head, if there are any."""
        spec = self._spec
        if key is not None and value is not None and self._slot_mapping is not None:
            key = key.view(-1, spec.num_kv_heads, spec.head_size)
            value = value.view(-1, spec.num_kv_heads, spec.head_size_v)
            impl.write_kv(key, value, cache, self._slot_mapping)


def attend(
    child: AttentionImpl,
    query: torch.Tensor,
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run `forward` of a child.

    Raises:
        ContractError: it returned its result instead of writing it to `output`.
    """
    forward: Callable[..., object] = child.forward
    check_in_place(child, forward(query, cache, metadata, output, lse))
