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
from typing import Any

import torch

from attnlib.cache.hybrid_groups import (
    Group,
    KVCacheGroup,
    StateGroup,
    check_groups,
    pool_block_bytes,
    with_equal_blocks,
)
from attnlib.cache.pages import page_bytes
from attnlib.cache.scales import check_same_kind
from attnlib.cache.states import StateCache
from attnlib.cache.storage import PagedKVCache
from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_id
from attnlib.ops.block_moves import BlockPairs, checked_pairs, move_blocks

__all__ = ["Group", "HybridKVCache", "KVCacheGroup", "StateGroup", "with_equal_blocks"]


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
        ContractError: there is no group, a value is none, or fewer than two blocks.
    """

    @explains_device
    @torch.inference_mode(False)  # writable in and outside of inference mode
    def __init__(
        self,
        groups: Mapping[str, Group],
        num_blocks: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_groups(groups)
        if not groups or as_id("num_blocks", num_blocks) < 2:
            raise ContractError(
                f"a pool of {num_blocks} blocks for {len(groups)} groups cannot hold anything: "
                "block 0 is the null block, so give at least one group and two blocks"
            )
        self.groups: dict[str, Any] = dict(groups)
        self.num_blocks = num_blocks
        self.block_bytes = pool_block_bytes(groups)
        # Zeros: a null block that is read behind a window must be finite.
        self._storage = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)
        self.caches = {
            name: self._caches(group)
            for name, group in groups.items()
            if isinstance(group, KVCacheGroup)
        }
        self.states = {
            name: StateCache(group.spec, self._storage, first_slot=1)
            for name, group in groups.items()
            if isinstance(group, StateGroup)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self._storage.numel()

    def swap_blocks(self, other: HybridKVCache, pairs: BlockPairs) -> None:
        """Copy whole blocks, of keys or of states, into a pool on any device.

        Args:
            other: the destination; its groups store the same (block sizes, layers, dtypes, form of
                states), with equal scales (M9).
            pairs: (block of this pool, block of `other`), as `HybridBlockAllocator.adopt` returns
                them, or an integer tensor `[n, 2]`.

        Raises:
            ContractError: pools of other blocks or scales, an id that is out of range or the null
                block, or a destination that occurs twice; nothing is written.
        """
        self._check_same_blocks(other)
        source, destination = checked_pairs(pairs, self.num_blocks, other.num_blocks)
        if 0 in source or 0 in destination:
            place = source.index(0) if 0 in source else destination.index(0)
            raise ContractError(
                f"block pair {(source[place], destination[place])} (index {place}) names the null "
                "block, which stays zero: leave it out",
                rule="P12",
            )
        move_blocks((self._storage,), (other._storage,), source, destination)

    def _check_same_blocks(self, other: HybridKVCache) -> None:
        if not isinstance(other, HybridKVCache):
            raise ContractError(f"other is a {type(other).__name__}; pass a HybridKVCache")
        found = [
            (
                one.block_bytes,
                {n: (len(c), one.groups[n].page_size) for n, c in one.caches.items()},
                {n: (s.layout, one.groups[n].num_layers) for n, s in one.states.items()},
            )
            for one in (self, other)
        ]
        for what, mine, theirs in zip(
            ("block_bytes", "groups of keys", "groups of states"), *found, strict=True
        ):
            if mine != theirs:
                raise ContractError(
                    f"{what} are {mine} in the source and {theirs} in the destination: blocks move "
                    "between pools of equal groups",
                    rule="T15",
                )
        for name, caches in self.caches.items():
            for one, two in zip(caches, other.caches[name], strict=True):
                check_same_kind(one, two)

    def _caches(self, group: KVCacheGroup) -> list[PagedKVCache]:
        """One cache per layer: in each block, the keys and then the values of the layer."""
        spec, itemsize = group.spec, group.spec.kv_dtype.itemsize
        if spec.scales_in_page:
            return self._caches_with_scales(group)
        elements = self._storage.view(-1).view(spec.kv_dtype)
        stride, tokens, heads = self.block_bytes // itemsize, spec.block_size, spec.num_kv_heads
        per_layer = tokens * group.bytes_per_token // group.num_layers // itemsize
        keys, page, count = tokens * heads * spec.head_size, tokens, self.num_blocks
        if group.page_size is not None:
            page, pages = group.page_size, tokens // group.page_size
            stride //= group.pages_in_block
            per_layer, keys = group.pages_in_block // group.num_layers * stride, pages * stride
            count = group.pages([count - 1])[-1] + 1

        def view(size: int, offset: int) -> torch.Tensor:
            shape = (count, page, heads, size)
            return elements.as_strided(shape, (stride, heads * size, size, 1), offset)

        caches = []
        for first in range(0, group.num_layers * per_layer, per_layer):
            key = view(spec.head_size, first)
            if spec.use_mla:  # the value is a prefix of the key (P10)
                value = key[..., : spec.head_size_v]
            else:
                value = view(spec.head_size_v, first + keys)
            caches.append(PagedKVCache.from_views(key, value))
            caches[-1].rotation = spec.kv_rotation
        return caches

    def _caches_with_scales(self, group: KVCacheGroup) -> list[PagedKVCache]:
        """One cache per layer: in each block, the pages of the layer (P13)."""
        spec, blocks = group.layer_spec, range(self.num_blocks)
        size = page_bytes(spec)
        pages = group.block_size // spec.block_size
        stride = self.block_bytes // group.pages_in_block if group.page_size else self.block_bytes
        apart = pages * stride if group.page_size else size  # layers in a block
        shape, storage = (group.pages(blocks)[-1] + 1, size), self._storage.view(-1)
        return [
            PagedKVCache.from_pages(storage.as_strided(shape, (stride, 1), layer * apart), spec)
            for layer in range(group.num_layers)
        ]
