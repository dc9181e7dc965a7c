"""`vllm.attention.backends.abstract`: the base classes of a backend in vLLM's style.

`AttentionMetadata` and `AttentionImpl` are for classes of their users. Backends of attnlib have
those of attnlib, which are subclasses of this `AttentionMetadata` for `isinstance`.
"""

from __future__ import annotations

import functools
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.compat.vllm.runner import AttentionMetadataBuilder, AttentionState
from attnlib.metadata.batch_metadata import AttentionMetadata as Metadata
from attnlib.spec import AttentionType

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionType",
]

T = TypeVar("T")


@dataclass
class AttentionMetadata(Metadata, metaclass=ABCMeta):
    """`attnlib.AttentionMetadata` with vLLM's constructor: six required arguments, by position or
    by name. Subclasses are dataclasses that add fields.

    `cross_attention` of attnlib is an attribute here, and not a field. The properties
    `prefill_metadata` and `decode_metadata` have the defaults of attnlib.
    """

    num_prefills: int = field()
    num_prefill_tokens: int = field()
    num_decode_tokens: int = field()
    slot_mapping: torch.Tensor | None = field()
    multi_modal_placeholder_index_maps: Mapping[str, Any] | None = field()
    enable_kv_scales_calculation: bool = field()
    cross_attention: ClassVar[Any] = None  # type: ignore[misc]  # vLLM's class has no such field

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A `__post_init__` of a subclass need not call the one of attnlib."""
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def both(self: Metadata, *given: Any) -> None:
                Metadata.__post_init__(self)
                own(self, *given)

            cls.__post_init__ = both  # type: ignore[method-assign]

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, Metadata) if cls is AttentionMetadata else NotImplemented


class AttentionImpl(ABC, Generic[T]):
    """Base class of implementations in vLLM's style, which `compat.vllm.Attention` and
    `adapt_backend` construct and call."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER.value,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values to the cache, then attend.

        Args:
            layer: the calling layer, with `_q_scale`, `_k_scale` and `_v_scale`.
            query: `[T, Hq, D]`; flat if this method has no argument `output`, like key and value.
            key, value: `[T, Hkv, D]`; None where the cache holds them.
            kv_cache: of the shape of `get_kv_cache_shape` of the backend.
            attn_metadata: of the batch.
            output: `[T, Hq, D]`, where to write.

        Returns:
            `output`, or another tensor of its size.
        """
