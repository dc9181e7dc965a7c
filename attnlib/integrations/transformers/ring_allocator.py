"""Block tables for the windowed layers of the paged cache of transformers.

transformers keeps the keys of a window in a ring of pages, and has no block table for it: a model
with windowed layers then gathers the keys of all windows in every layer and step. A decode needs no
order: once its own key has replaced the oldest one, the ring holds exactly the keys that it sees.
So the table of a decode is that of the ring's pages, and its last column is the slot of the new
key.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RingAllocators", "without_slot_column"]


class RingAllocators:
    """In the place of the allocator class of windowed layers: for models that attnlib serves it
    makes one with block tables, for others the one of transformers.

    Attributes:
        supports_block_table: of the class of transformers.
        layer_type: likewise.
    """

    def __init__(self, original: Any, names: tuple[str, ...]) -> None:
        """Args:
        original: `SlidingAttentionCacheAllocator`.
        names: attention implementations that attnlib serves.
        """
        self._original, self._names = original, names
        self._ring = _ring_allocator(original)
        self.supports_block_table, self.layer_type = False, original.layer_type

    def __call__(self, **settings: Any) -> Any:
        """An allocator with these settings, among them the model's config."""
        served = settings["config"]._attn_implementation in self._names
        return (self._ring if served else self._original)(**settings)


def _ring_allocator(original: Any) -> Any:
    base: Any = original.__mro__[
        1
    ]  # of layers with full attention: its pages are those of the ring

    class RingAllocator(original):  # type: ignore[misc]  # known at run time only
        """A ring of pages with a block table for decodes."""

        supports_block_table = True

        def fill_block_table(
            self, request_id: str, past_length: int, query_length: int, block_table: Any
        ) -> None:
            """The pages of the ring, and in the last column the slot of the new token."""
            base.fill_block_table(self, request_id, past_length, query_length, block_table)
            (slot,) = self._token_indices_to_physical_indices(request_id, past_length, 1)
            block_table[-1] = slot

        def get_cache_for_block_table(self, layer_idx: int) -> Any:
            """Keys and values of a layer in pages."""
            return base.get_cache_for_block_table(self, layer_idx)

    return RingAllocator


def without_slot_column(original: Any) -> Any:
    """`PagedAttentionCache._infer_max_decode_fast_path_length` that leaves the last column of the
    block tables to the slots of rings."""

    def longest_decode(self: Any) -> int:
        longest: int = original(self)
        allocators = self.cache_allocators.values()
        if longest and any(type(allocator).__name__ == "RingAllocator" for allocator in allocators):
            longest -= min(allocator.tokens_per_page for allocator in allocators)
        return longest

    return longest_decode
