"""Per-layer attention of a composite: each child attends for its rows; one writes the cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.composite.metadata import CompositeMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.spec import AttentionSpec

__all__ = ["CompositeImpl"]


class CompositeImpl(AttentionImpl):
    """Runs each child on its rows; the prefill child writes the cache.

    `make_composite` creates a subclass for each pair of backends.
    """

    prefill_backend: ClassVar[type[AttentionBackend]]
    decode_backend: ClassVar[type[AttentionBackend]]

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        kwargs.pop("config", None)
        self._prefill = self.prefill_backend.get_impl_cls()(
            spec, config=self.prefill_backend.config, **kwargs
        )
        self._decode = self.decode_backend.get_impl_cls()(
            spec, config=self.decode_backend.config, **kwargs
        )
        self.read_per_head_tensors_from(self._owner)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "scale":
            for child in self._children:
                child.scale = value

    @property
    def _children(self) -> list[AttentionImpl]:
        """The children that exist: none while `AttentionImpl.__init__` runs."""
        names = ("_prefill", "_decode")
        return [self.__dict__[name] for name in names if name in self.__dict__]

    def set_block_size(self, block_size: int) -> None:
        """See `AttentionImpl.set_block_size`."""
        super().set_block_size(block_size)
        for child in self._children:
            child.set_block_size(block_size)

    def read_per_head_tensors_from(self, owner: Any) -> None:
        """See `AttentionImpl.read_per_head_tensors_from`; the children read from `owner` too."""
        super().read_per_head_tensors_from(owner)
        for child in self._children:
            child.read_per_head_tensors_from(owner)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`."""
        self._prefill.write_kv(key, value, cache, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: CompositeMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        split = (
            metadata.num_decode_tokens
            if metadata.prefill is not None and metadata.decode is not None
            else None
        )
        if metadata.decode is not None:
            rows = slice(0, split)
            self._decode.forward(
                query[rows],
                cache,
                metadata.decode,
                output[rows],
                None if lse is None else lse[rows],
            )
        if metadata.prefill is not None:
            rows = slice(split or 0, None)
            self._prefill.forward(
                query[rows],
                cache,
                metadata.prefill,
                output[rows],
                None if lse is None else lse[rows],
            )
