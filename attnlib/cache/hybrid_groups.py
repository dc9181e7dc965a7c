"""Groups of layers whose caches or states are blocks of one pool, and the sizes of these blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from attnlib.cache.pages import page_bytes
from attnlib.cache.states import state_layout
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_id
from attnlib.spec import AttentionSpec, StateSpec

__all__ = [
    "Group",
    "KVCacheGroup",
    "StateGroup",
    "check_groups",
    "pool_block_bytes",
    "with_equal_blocks",
]

_ALIGNMENT = 256
"""Bytes to which the size of a block is rounded up: TMA and vector loads need multiples of 16."""
_PAGE_ALIGNMENT = 128
"""Bytes of which the distance of pages is a multiple: a line of the L2 cache."""
_LARGEST_PAGE = 256
"""Tokens of a page, at most: the largest blocks that all kernels take."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with one spec, whose keys and values are stored in the same blocks.

    Attributes:
        spec: of each layer; `spec.block_size` tokens are one block.
        num_layers: layers that own a cache. Layers that share one of them (P8) do not count.
        page_size: tokens of a page, of which a block holds several: kernels, block tables and specs
            of layers have pages. None for blocks of one page.

    Raises:
        ContractError: there is no layer, the spec has no paged cache, or its blocks have no such
            pages.
    """

    spec: AttentionSpec
    num_layers: int = 1
    page_size: int | None = None

    def __post_init__(self) -> None:
        AttentionSpec.check_kind(self.spec, "KVCacheGroup")
        if as_id("num_layers", self.num_layers) < 1 or not self.spec.is_paged:
            raise ContractError(
                f"a group of {self.num_layers} layers with attn_type={self.spec.attn_type.value} "
                "has no paged cache: give at least one layer that attends through a cache"
            )
        if self.page_size is None:
            return
        if as_id("page_size", self.page_size) < 1 or self.block_size % self.page_size:
            raise ContractError(
                f"page_size={self.page_size} does not divide blocks of {self.block_size} tokens: "
                "give a divisor, or None for blocks of one page"
            )
        if not _has_pages(self.spec):
            raise ContractError(
                f"page_size={self.page_size}, and keys and values of {self.spec} have pages of "
                "different sizes: give None"
            )

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.spec.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, with its share of what pages with scales leave unused
        (P13)."""
        spec = self.layer_spec
        if spec.scales_in_page:
            return self.num_layers * -(-page_bytes(spec) // spec.block_size)
        elements = spec.head_size if spec.use_mla else spec.head_size + spec.head_size_v
        return self.num_layers * spec.num_kv_heads * elements * spec.kv_dtype.itemsize

    @functools.cached_property
    def layer_spec(self) -> AttentionSpec:
        """The spec of its layers, whose blocks are pages."""
        return self.spec.replace(block_size=self.page_size or self.block_size)

    @property
    def pages_in_block(self) -> int:
        """Pages in a block, of keys and of values in each layer, or of both with their scales: they
        are equally far apart, and the ids of the pages of a layer count all of them."""
        pages = self.block_size // (self.page_size or self.block_size)
        is_one = self.spec.use_mla or self.spec.scales_in_page
        return pages * self.num_layers * (1 if is_one else 2)

    def pages(self, blocks: Iterable[int]) -> list[int]:
        """The pages of blocks, in the order of their tokens."""
        if self.page_size is None:
            return list(blocks)
        step, count = self.pages_in_block, self.block_size // self.page_size
        return [block * step + page for block in blocks for page in range(count)]

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


def check_groups(groups: Mapping[str, Any]) -> None:
    """Whether each group is one of a pool.

    Raises:
        ContractError: names the first that is not.
    """
    if not isinstance(groups, Mapping):
        raise ContractError(
            f"groups is a {type(groups).__name__}; it must be a dictionary from group name to "
            "KVCacheGroup or StateGroup"
        )
    for name, group in groups.items():
        if not isinstance(group, KVCacheGroup | StateGroup):
            raise ContractError(
                f"group {name!r} is a {type(group).__name__}: give a KVCacheGroup of a spec, or a "
                "StateGroup"
            )


def with_equal_blocks(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The groups with block sizes that make their blocks about equally large in bytes.

    The group with the most bytes per block keeps its block size; the block sizes of the others
    are doubled as long as the blocks fit into as many bytes. What is left over of a smaller block
    is not used. States cannot be divided, and are often larger than a power of two of key blocks:
    beside states, a single group of keys gets the largest multiple of its block size. Kernels
    prefer powers of two up to 256: other blocks have pages of such sizes.

    Args:
        groups: group name -> group, with the smallest block size that its kernels support.

    Raises:
        ContractError: a value is not a group.
    """
    check_groups(groups)
    keys = {name: group for name, group in groups.items() if isinstance(group, KVCacheGroup)}
    largest = max((_block_bytes(group) for group in groups.values()), default=0)
    found = dict(groups)
    for name, group in keys.items():
        times, page = largest // _block_bytes(group), group.page_size or group.block_size
        if len(keys) > 1 or len(keys) == len(groups):
            times = 1 << (times.bit_length() - 1)
        size = group.block_size * times
        while size % (2 * page) == 0 and 2 * page <= _LARGEST_PAGE:
            page *= 2
        is_whole = page == size or not _has_pages(group.spec)
        spec = group.spec.replace(block_size=size)
        found[name] = replace(group, spec=spec, page_size=None if is_whole else page)
    return found


def _has_pages(spec: AttentionSpec) -> bool:
    """Whether keys and values of a page have one stride, so that one page table serves both."""
    return spec.use_mla or spec.scales_in_page or spec.head_size == spec.head_size_v


def pool_block_bytes(groups: Mapping[str, Group]) -> int:
    """Bytes of a block of a pool."""
    divided = (g for g in groups.values() if isinstance(g, KVCacheGroup) and g.page_size)
    unit = lcm(_ALIGNMENT, *(_PAGE_ALIGNMENT * group.pages_in_block for group in divided))
    return -(-max(map(_block_bytes, groups.values())) // unit) * unit


def _block_bytes(group: Group) -> int:
    """Bytes that a block of the group needs."""
    if isinstance(group, StateGroup):
        return group.block_bytes
    return group.block_size * group.bytes_per_token
