"""The checks of a batch that every method of a builder runs behind."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from attnlib.metadata.batch_metadata import AttentionMetadata
from attnlib.metadata.checks import check_block_size, check_limits
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import LengthsRead

if TYPE_CHECKING:
    from attnlib.metadata.builder import AttentionMetadataBuilder

__all__ = ["with_checks"]


def with_checks(build: Any) -> Any:
    """A method of a builder, behind the checks of its batch."""

    @functools.wraps(build)
    def checked(self: AttentionMetadataBuilder[Any], *args: Any, **kwargs: Any) -> Any:
        first = None
        for common in (*args, *kwargs.values()) if kwargs else args:
            if not isinstance(common, CommonAttentionMetadata):
                continue
            own = common
            if type(common) is not CommonAttentionMetadata:
                own = common.normalized()
                args = tuple(own if x is common else x for x in args)
                kwargs = {name: own if x is common else x for name, x in kwargs.items()}
            first = first or own
            if own.block_size is not None:
                check_block_size(own, self.spec)
            if self.limits is not None:
                check_limits(own, self.limits)
        built = build(self, *args, **kwargs)
        if first is not None and self.needs_host_lengths and self.device.type != "cpu":
            if isinstance(built, AttentionMetadata):
                vars(built)["lengths_read"] = LengthsRead(first)
        return built

    return checked
