"""The plan of a backend without plans."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnlib.backends.base import AttentionImpl, check_in_place
from attnlib.cache.storage import PagedKVCache
from attnlib.layer.call import ExtraKeys
from attnlib.layer.metadata_checks import check_addresses
from attnlib.layer.tensor_checks import refuse_in_place
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.spec import AttentionSpec

__all__ = ["MethodPlan"]


class _CheckedAddresses:
    """Block ids, slots and lengths of a batch on the CPU that passed `check_addresses`, which is
    repeated after a change in place. Tensors of inference mode do not count their changes.

    Args:
        metadata: of the batch.
    """

    __slots__ = ("_checked", "_tensors")

    def __init__(self, metadata: AttentionMetadata) -> None:
        facts = metadata.facts
        self._tensors = tuple(
            tensor
            for tensor in (facts.block_table, facts.seq_lens, metadata.slot_mapping)
            if tensor is not None and tensor.is_cpu and not tensor.is_inference()
        )
        self._checked = self._versions()

    def check(self, metadata: AttentionMetadata, cache: PagedKVCache) -> None:
        """Raise the error of `check_addresses` if a change leaves an address outside the cache."""
        versions = self._versions()
        if versions != self._checked:
            check_addresses(metadata, cache)
            self._checked = versions

    def _versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self._tensors)


class MethodPlan:
    """Calls `write_kv`, then `forward`, of an impl."""

    def __init__(self, spec: AttentionSpec, metadata: AttentionMetadata, writes: bool) -> None:
        self._spec = spec
        self._metadata = metadata
        self._slots = metadata.slot_mapping if writes else None
        self._addresses = _CheckedAddresses(metadata)

    def run(
        self,
        impl: AttentionImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        extra: ExtraKeys | None = None,
    ) -> None:
        """See `StepPlan.run`; `extra` is what the call passes besides."""
        if isinstance(extra, QueryTensors):
            impl, extra = impl.of_call(extra), None
        spec, metadata = self._spec, self._metadata
        if metadata.lengths_read is not None:
            metadata.lengths_read.check()
        if cache is not None:
            self._addresses.check(metadata, cache)
        query = query.view(-1, spec.num_heads, spec.head_size) if query.dim() == 2 else query
        if output.dim() == 2:
            output = output.view(-1, spec.num_heads, spec.head_size_v)
        if key is not None and value is not None:
            key = key.view(-1, spec.num_kv_heads, spec.head_size) if key.dim() == 2 else key
            if value.dim() == 2:
                value = value.view(-1, spec.num_kv_heads, spec.head_size_v)
            if cache is None:
                refuse_in_place(output, key=key, value=value)
                unpaged: Callable[..., object] = impl.forward_unpaged
                check_in_place(impl, unpaged(query, key, value, metadata, output, lse))
                return
            if self._slots is not None:
                impl.write_kv(key, value, cache, self._slots)
        assert cache is not None  # `check_call` refuses a paged layer without one
        if extra is not None:
            over: Callable[..., object] = impl.forward_selected
            if isinstance(extra, CompressedKeys):
                over = impl.forward_compressed
            check_in_place(impl, over(query, cache, metadata, extra, output, lse))
            return
        forward: Callable[..., object] = impl.forward
        check_in_place(impl, forward(query, cache, metadata, output, lse))
