"""Two backends, one for each phase, as one ordinary backend: `prefill:flash_attn,decode:triton`.

Both read one cache. The builder lets each child build for its own part of the batch; the impl runs each child on its own rows. What the pair can
do is what both can do.
"""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.cache.layout import LAYOUTS, negotiate_layout
from attnlib.cache.storage import PagedKVCache
from attnlib.capabilities import NOT_STATED, Capabilities, Sizes
from attnlib.device import DeviceInfo
from attnlib.errors import LayoutMismatchError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.split import leading_decodes
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport

__all__ = ["CompositeBackend", "make_composite"]

Backend = type[AttentionBackend]


@dataclass(kw_only=True)
class CompositeMetadata(AttentionMetadata):
    """A batch in two parts, each in its own backend's form.

    Attributes:
        num_actual_tokens: T.
        query_start_loc, seq_lens, block_table: of the whole batch, for validation and records.
        decode, prefill: the children's metadata; None for a part that is empty.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    decode: Any
    prefill: Any

    @property
    def prefill_metadata(self) -> Any:
        """The prefill child's metadata."""
        return self.prefill

    @property
    def decode_metadata(self) -> Any:
        """The decode child's metadata."""
        return self.decode


class CompositeMetadataBuilder(AttentionMetadataBuilder[CompositeMetadata]):
    """Cuts the batch where the decode child's decodes end, and lets each child build its part."""

    prefill_backend: ClassVar[Backend]
    decode_backend: ClassVar[Backend]

    def __init__(self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(spec, device, **kwargs)
        kwargs.pop("config", None)
        self._prefill = self.prefill_backend.make_builder(spec, device, **kwargs)
        self._decode = self.decode_backend.make_builder(spec, device, **kwargs)
        self._threshold = self._decode.reorder_batch_threshold or 1

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """As the decode child wants it."""
        return self._decode.reorder_batch(input_batch, scheduler_output)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> CompositeMetadata:
        """Both children's metadata; a part without requests is not built."""
        common = common_attn_metadata
        decodes, tokens = leading_decodes(common, self._threshold)
        decode = prefill = None
        if decodes == common.num_reqs:
            decode = self._decode.build(common_prefix_len, common, fast_build)
        elif decodes == 0:
            prefill = self._prefill.build(common_prefix_len, common, fast_build)
        else:
            decode = self._decode.build(common_prefix_len, common.unpadded(decodes, tokens), fast_build)
            prefill = self._prefill.build(common_prefix_len, _behind(common, decodes, tokens), fast_build)
        return CompositeMetadata(
            num_prefills=common.num_reqs - decodes,
            num_prefill_tokens=common.num_actual_tokens - tokens,
            num_decode_tokens=tokens,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            decode=decode,
            prefill=prefill,
        )


def _behind(common: CommonAttentionMetadata, num_reqs: int, num_tokens: int) -> CommonAttentionMetadata:
    """The requests after the first `num_reqs`, as a batch of their own."""
    return common.replace(
        query_start_loc=common.query_start_loc[num_reqs:] - num_tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[num_reqs:] - num_tokens,
        seq_lens=common.seq_lens[num_reqs:],
        seq_lens_cpu=common.seq_lens_cpu[num_reqs:],
        num_computed_tokens_cpu=common.num_computed_tokens_cpu[num_reqs:],
        num_reqs=common.num_reqs - num_reqs,
        num_actual_tokens=common.num_actual_tokens - num_tokens,
        block_table_tensor=None if common.block_table_tensor is None else common.block_table_tensor[num_reqs:],
        slot_mapping=None if common.slot_mapping is None else common.slot_mapping[num_tokens:],
        causal=common.causal[num_reqs:] if isinstance(common.causal, torch.Tensor) else common.causal,
        query_bias=None if common.query_bias is None else common.query_bias[num_tokens:],
    )


class CompositeImpl(AttentionImpl):
    """Runs each child on its own rows; the prefill child writes the cache."""

    prefill_backend: ClassVar[Backend]
    decode_backend: ClassVar[Backend]

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        kwargs.pop("config", None)
        self._prefill = self.prefill_backend.get_impl_cls()(spec, config=self.prefill_backend.config, **kwargs)
        self._decode = self.decode_backend.get_impl_cls()(spec, config=self.decode_backend.config, **kwargs)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
        """See `AttentionImpl.write_kv`."""
        self._prefill.write_kv(key, value, cache, slot_mapping)

    def forward(
        self, query: torch.Tensor, cache: PagedKVCache, metadata: CompositeMetadata, output: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """See `AttentionImpl.forward`."""
        split = metadata.num_decode_tokens if metadata.prefill is not None and metadata.decode is not None else None
        if metadata.decode is not None:
            rows = slice(0, split)
            self._decode.forward(query[rows], cache, metadata.decode, output[rows], None if lse is None else lse[rows])
        if metadata.prefill is not None:
            rows = slice(split or 0, None)
            self._prefill.forward(query[rows], cache, metadata.prefill, output[rows], None if lse is None else lse[rows])

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: CompositeMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_unpaged`."""
        child, part = (self._decode, metadata.decode) if metadata.prefill is None else (self._prefill, metadata.prefill)
        child.forward_unpaged(query, key, value, part, output, lse)


class CompositeBackend(AttentionBackend):
    """Base of every pair; `make_composite` makes the classes."""

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
        """What is missing for either."""
        return [f"{child.get_name()}: {reason}" for child in (cls.prefill_backend, cls.decode_backend) for reason in child.unavailable(device)]

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Either child's own reasons (they name the child), and encoders, which have one phase only."""
        reasons = [
            f"{child.get_name()}: {reason}"
            for child in (cls.prefill_backend, cls.decode_backend)
            for reason in child.validate_configuration(spec, device)
        ]
        return reasons if spec.is_paged else [*reasons, f"attn_type={spec.attn_type.value} has no decode phase: name one backend"]


class _CompositeMeta(ABCMeta):
    """Metaclass of pairs: they are made at run time, so they are pickled by their two halves."""


_made: dict[tuple[Backend, Backend], Backend] = {}


def make_composite(prefill: Backend, decode: Backend) -> Backend:
    """The backend that sends prefills to one backend and decodes to another; the same class each time, and the backend itself for equal halves.

    Raises:
        LayoutMismatchError: the two read no common cache layout.
    """
    if prefill is decode:
        return prefill
    if (prefill, decode) not in _made:
        halves = {"prefill_backend": prefill, "decode_backend": decode}
        body = {
            **halves,
            "__module__": __name__,
            "description": f"prefills by {prefill.get_name()}, decodes by {decode.get_name()}",
            "capabilities": _common(prefill, decode),
            "builder_cls": type("CompositeMetadataBuilder", (CompositeMetadataBuilder,), {**halves, "__module__": __name__}),
            "impl_cls": type("CompositeImpl", (CompositeImpl,), {**halves, "__module__": __name__}),
        }
        _made[prefill, decode] = _CompositeMeta("CompositeBackend", (CompositeBackend,), body)  # type: ignore[assignment]  # a class
    return _made[prefill, decode]


def _reduce(cls: Any) -> tuple[Any, ...]:
    return make_composite, (cls.prefill_backend, cls.decode_backend)


copyreg.pickle(_CompositeMeta, _reduce)


def _common(prefill: Backend, decode: Backend) -> Capabilities:
    """What both declare. Sets of sizes cannot be intersected in general: those of the decode half stand, and `supports_combination` asks both."""
    mine, other = prefill.capabilities, decode.capabilities
    layouts = _layouts(prefill, decode)
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(Capabilities)):
        values[name] = _both(getattr(mine, name), getattr(other, name))
    values.update(
        kv_cache_layouts=layouts,
        attn_types=tuple(t for t in values["attn_types"] or () if t in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)),
        min_capability=max((c for c in (mine.min_capability, other.min_capability) if c), default=None),
        max_capability=min((c for c in (mine.max_capability, other.max_capability) if c), default=None),
        needs_finite_cache=mine.needs_finite_cache or other.needs_finite_cache,
        allocates_in_forward=mine.allocates_in_forward or other.allocates_in_forward,
        batch_invariant=False,
        cudagraph=min(mine.cudagraph or CudaGraphSupport.NEVER, other.cudagraph or CudaGraphSupport.NEVER),
    )
    return Capabilities(**values)


def _both(mine: Any, other: Any) -> Any:
    if mine is NOT_STATED or other is NOT_STATED:
        return NOT_STATED
    if isinstance(mine, bool):
        return mine and other
    if isinstance(mine, tuple) and isinstance(other, tuple) and not isinstance(mine, Sizes):
        return tuple(value for value in mine if value in other)
    return other


def _layouts(prefill: Backend, decode: Backend) -> tuple[str, ...]:
    demands = [(child.get_name(), child.capabilities.kv_cache_layouts or ("NHD",)) for child in (prefill, decode)]
    best = negotiate_layout(demands)  # raises with both demands when there is none
    rest = []
    for name in LAYOUTS:
        try:
            negotiate_layout(demands, name)
        except LayoutMismatchError:
            continue
        rest.append(name)
    return (best, *(name for name in rest if name != best))
