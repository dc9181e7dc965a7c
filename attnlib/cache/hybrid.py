"""One pool of memory for the caches of several layer groups.

Layers that see different keys need different amounts of memory: a layer with a sliding window needs
the last W tokens of a request, a full one all of them. In one pool, the memory that windowed layers
give back serves full layers too. All blocks of the pool have the same size in bytes; a block holds
`block_size` tokens of all layers of one group, and groups differ in `block_size`. The caches are
strided views of the pool (P1), so kernels see ordinary paged caches. As in vLLM's hybrid KV cache
manager, a block belongs to any group, one at a time. The state of a request in one state layer is a
block too (T15).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.cache.pages import page_bytes
from attnlib.cache.states import StateCache, state_layout
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_id
from attnlib.spec import AttentionSpec, StateSpec

__all__ = ["Group", "HybridKVCache", "KVCacheGroup", "StateGroup", "with_equal_blocks"]

_ALIGNMENT = 256
"""Bytes to which the size of a block is rounded up: TMA and vector loads need multiples of 16."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with one spec, whose keys and values are stored in the same blocks.

    Attributes:
        spec: of each layer; `spec.block_size` tokens are one block.
        num_layers: layers that own a cache. Layers that share one of them (P8) do not count.

    Raises:
        ContractError: there is no layer, or the spec has no paged cache.
    """

    spec: AttentionSpec
    num_layers: int = 1

    def __post_init__(self) -> None:
        AttentionSpec.check_kind(self.spec, "KVCacheGroup")
        if as_id("num_layers", self.num_layers) < 1 or not self.spec.is_paged:
            raise ContractError(
                f"a group of {self.num_layers} layers with attn_type={self.spec.attn_type.value} "
                "has no paged cache: give at least one layer that attends through a cache"
            )

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.spec.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, with its share of what pages with scales leave unused
        (P13)."""
        spec = self.spec
        if spec.scales_in_page:
            return self.num_layers * -(-page_bytes(spec) // spec.block_size)
        elements = spec.head_size if spec.use_mla else spec.head_size + spec.head_size_v
        return self.num_layers * spec.num_kv_heads * elements * spec.kv_dtype.itemsize

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position`, or a later one, can see.

        Blocks with earlier positions only are no longer needed when the next query is at
        `position`.
        """
        left, chunk = self.spec.visible_window.left, self.spec.attention_chunk_size
        first = 0 if left is None else max(position - left, 0)
        if chunk:
            first = max(first, position // chunk * chunk)
        return first


@dataclass(frozen=True)
class StateGroup:
    """State layers with one spec. Each layer has one block per request.

    Attributes:
        spec: of each layer, with the form and chunk size of its backend (`StateLayer.spec`).
        num_layers: layers with states of their own.

    Raises:
        ContractError: there is no layer.
    """

    spec: StateSpec
    num_layers: int = 1

    def __post_init__(self) -> None:
        StateSpec.check_kind(self.spec, "StateGroup")
        if as_id("num_layers", self.num_layers) < 1:
            raise ContractError(f"a group of {self.num_layers} state layers: give at least one")

    @property
    def block_bytes(self) -> int:
        """Bytes of one request in one layer."""
        return state_layout(self.spec).bytes_per_slot


Group = KVCacheGroup | StateGroup
"""Layers that share a pool with others."""


def with_equal_blocks(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The groups with block sizes that make their blocks about equally large in bytes.

    The group with the most bytes per block keeps its block size; the block sizes of the others
    are doubled as long as the blocks fit into as many bytes: kernels prefer powers of two. What is
    left over of a smaller block is not used. States cannot be divided, and are often larger than a
    power of two of key blocks: beside states, a single group of keys gets the largest multiple of
    its block size.

    Args:
        groups: group name -> group, with the smallest block size that its kernels support.
    """
    keys = {name: group for name, group in groups.items() if isinstance(group, KVCacheGroup)}
    largest = max((_block_bytes(group) for group in groups.values()), default=0)
    found = dict(groups)
    for name, group in keys.items():
        times = largest // _block_bytes(group)
        if len(keys) > 1 or len(keys) == len(groups):
            times = 1 << (times.bit_length() - 1)
        found[name] = replace(group, spec=group.spec.replace(block_size=group.block_size * times))
    return found


def _block_bytes(group: Group) -> int:
    """Bytes that a block of the group needs."""
    if isinstance(group, StateGroup):
        return group.block_bytes
    return group.block_size * group.bytes_per_token


class HybridKVCache:
    """The caches of all layers of a model, over one pool of blocks.

    Args:
        groups: group name -> group, for example from `with_equal_blocks`.
        num_blocks: blocks of the pool, each for any group. Block 0 is the null block: it stays
            zero, and stands in block tables for blocks behind a window (P12).
        device: None for torch's default device.

    Attributes:
        groups: as given.
        num_blocks: as given.
        block_bytes: bytes of one block.
        caches: group of keys -> one cache per layer.
        states: group of states -> the slots of all its layers, one per block: layers of a request
            have different ones.

    Raises:
        ContractError: there is no group, or fewer than two blocks.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        num_blocks: int,
        device: torch.device | str | None = None,
    ) -> None:
        if not groups or as_id("num_blocks", num_blocks) < 2:
            raise ContractError(
                f"a pool of {num_blocks} blocks for {len(groups)} groups cannot hold anything: "
                "block 0 is the null block, so give at least one group and two blocks"
            )
        self.groups: dict[str, Any] = dict(groups)
        self.num_blocks = num_blocks
        most = max(map(_block_bytes, groups.values()))
        self.block_bytes = -(-most // _ALIGNMENT) * _ALIGNMENT
        # Zeros: a null block that is read behind a window must be finite.
        self._storage = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)
        self.caches = {
            name: self._caches(group)
            for name, group in groups.items()
            if isinstance(group, KVCacheGroup)
        }
        self.states = {
            name: StateCache(group.spec, self._storage)
            for name, group in groups.items()
            if isinstance(group, StateGroup)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self._storage.numel()

    def _caches(self, group: KVCacheGroup) -> list[PagedKVCache]:
        """One cache per layer: in each block, the keys and then the values of the layer."""
        spec, itemsize = group.spec, group.spec.kv_dtype.itemsize
        if spec.scales_in_page:
            size = page_bytes(spec)
            starts = range(0, group.num_layers * size, size)
            return [
                PagedKVCache.from_pages(self._storage[:, first : first + size], spec)
                for first in starts
            ]
        elements = self._storage.view(-1).view(spec.kv_dtype)
        stride, tokens, heads = self.block_bytes // itemsize, spec.block_size, spec.num_kv_heads
        per_layer = tokens * group.bytes_per_token // group.num_layers // itemsize

        def view(size: int, offset: int) -> torch.Tensor:
            shape = (self.num_blocks, tokens, heads, size)
            return elements.as_strided(shape, (stride, heads * size, size, 1), offset)

        caches = []
        for first in range(0, group.num_layers * per_layer, per_layer):
            key = view(spec.head_size, first)
            if spec.use_mla:  # the value is a prefix of the key (P10)
                value = key[..., : spec.head_size_v]
            else:
                value = view(spec.head_size_v, first + tokens * heads * spec.head_size)
            caches.append(PagedKVCache.from_views(key, value))
            caches[-1].rotation = spec.kv_rotation
        return caches
