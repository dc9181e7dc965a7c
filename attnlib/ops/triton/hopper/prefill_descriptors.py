"""The TMA descriptors of a Hopper prefill, looked up by the addresses of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    QueryView,
    TransposedView,
    described,
    encode_views,
    encoded_descriptors,
)
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LaunchCache
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    KEY_MAP,
    QUERY,
    QUERY_MAP,
    VALUE_CACHE,
    VALUE_MAP,
    Lookup,
)

__all__ = ["PrefillDescriptors"]


@dataclass(frozen=True, eq=False)
class PrefillDescriptors:
    """The descriptors of a launch; fields as in `HopperPrefill`."""

    views: tuple[CacheView, CacheView | TransposedView]
    query_view: QueryView | None
    gathers: bool
    attend: BoundLaunch

    def lookups(self, direct: bool, of_caches: bool) -> tuple[Lookup, ...]:
        """The descriptors of a call, with or without those of its caches."""
        caches, maps, view = (KEY_CACHE, VALUE_CACHE), (KEY_MAP, VALUE_MAP), self.query_view
        found: list[Lookup] = []
        if of_caches and not self.gathers:
            found.append(
                Lookup(caches, self._descriptors, self._encode, maps)
                if direct
                else described(self.views, caches, maps)
            )
        if view is not None:
            found.append(
                Lookup((QUERY,), self._query_descriptors, self._encode_query, (QUERY_MAP,))
                if direct
                else described((view,), (QUERY,), (QUERY_MAP,))
            )
        return tuple(found)

    @cached_property
    def _descriptors(self) -> LaunchCache:
        """Encoded descriptors of caches like this one; known once the kernel has been launched."""
        return encoded_descriptors(self.views, self.attend)

    @cached_property
    def _query_descriptors(self) -> LaunchCache:
        """Encoded descriptors of queries like these; known once the kernel has been launched."""
        return encoded_descriptors(self.query_view, self.attend)

    def _encode(self, key: int, value: int) -> tuple[Any, ...]:
        """Encode and keep the descriptors of the caches at these addresses."""
        return encode_views(self._descriptors, self.attend, self.views, (key, value))

    def _encode_query(self, query: int) -> tuple[Any, ...]:
        """Encode and keep the descriptor of the queries at this address."""
        assert self.query_view is not None
        views, first = (self.query_view,), 0 if self.gathers else 2
        return encode_views(self._query_descriptors, self.attend, views, query, first=first)
