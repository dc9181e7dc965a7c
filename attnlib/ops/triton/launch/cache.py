"""The launch cache: prepared launches by call signature, one bounded table for all operations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["LAUNCHES", "LaunchCache"]


class LaunchCache(dict[Hashable, Any]):
    """A dictionary of at most `LIMIT` entries. A full cache is cleared and rebuilt on demand."""

    LIMIT = 4096

    def keep(self, key: Hashable, value: Any) -> Any:
        """Store and return `value`."""
        if len(self) >= self.LIMIT:
            self.clear()
        self[key] = value
        return value


LAUNCHES = LaunchCache()
"""Keys begin with the operation's name. Entries hold no addresses and keep no tensor alive."""
