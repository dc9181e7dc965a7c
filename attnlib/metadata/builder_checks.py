"""The checks of a batch that every method of a builder runs behind."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from attnlib.errors import ContractError
from attnlib.metadata.batch_metadata import AttentionMetadata
from attnlib.metadata.checks import check_block_size, check_limits
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import LengthsRead
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    from attnlib.metadata.builder import AttentionMetadataBuilder

__all__ = ["as_captured", "checked_limits", "with_checks"]

B = TypeVar("B")

_PARAMETERS = [
    (name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
    for name, default in (
        ("self", inspect.Parameter.empty),
        ("common_prefix_len", inspect.Parameter.empty),
        ("common_attn_metadata", inspect.Parameter.empty),
        ("fast_build", False),
    )
]
"""Those of `build`: name, kind and default."""


def checked_limits(limits: BatchLimits | None) -> BatchLimits | None:
    """The limits that a builder is given.

    Raises:
        ContractError: another type.
    """
    if limits is not None and not isinstance(limits, BatchLimits):
        raise ContractError(f"limits={limits!r} must be a BatchLimits, or None")
    return limits


def as_captured(builder: AttentionMetadataBuilder[Any], built: B) -> B:
    """The metadata of a capture, marked where its calls read no lengths on the host."""
    if not builder.needs_host_lengths and isinstance(built, AttentionMetadata):
        vars(built)["is_captured"] = True
    return built


def with_checks(build: Any) -> Any:
    """A method of a builder, behind the checks of its batch."""
    captures = build.__name__ == "build_for_cudagraph_capture"

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
            _check(self, own)
        built = build(self, *args, **kwargs)
        if captures:
            built = as_captured(self, built)
        if first is not None and self.needs_host_lengths and self.device.type != "cpu":
            if isinstance(built, AttentionMetadata):
                vars(built)["lengths_read"] = LengthsRead(first)
        return built

    parameters = inspect.signature(build).parameters.values()
    if [(x.name, x.kind, x.default) for x in parameters] != _PARAMETERS:
        return checked

    @functools.wraps(build)
    def checked_build(
        self: AttentionMetadataBuilder[Any],
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        # Most batches of most steps: packing the arguments takes longer than the checks.
        if type(common_attn_metadata) is CommonAttentionMetadata and not self.needs_host_lengths:
            own_size = getattr(self.spec, "block_size", None)
            if common_attn_metadata.block_size != own_size or self.limits is not None:
                _check(self, common_attn_metadata)
            return build(self, common_prefix_len, common_attn_metadata, fast_build)
        return checked(self, common_prefix_len, common_attn_metadata, fast_build)

    return checked_build


def _check(builder: AttentionMetadataBuilder[Any], common: CommonAttentionMetadata) -> None:
    if common.block_size is not None:
        check_block_size(common, builder.spec)
    if builder.limits is not None:
        check_limits(common, builder.limits)
