"""The compile-time arguments of a launch, with the constants of its kernel as one named tuple."""

from __future__ import annotations

from typing import Any

from attnlib.ops.triton.kernels.arguments import AttentionConfig

__all__ = ["with_config"]


def with_config(constants: dict[str, Any], kind: Any = AttentionConfig) -> dict[str, Any]:
    """Collect those of the constants that `kind` has as CONFIG.

    Args:
        constants: compile-time arguments and options (`num_warps`, ...) by name.
        kind: the named tuple that the kernel takes.
    """
    config = {name: value for name, value in constants.items() if name in kind._fields}
    others = {name: value for name, value in constants.items() if name not in kind._fields}
    return {**others, "CONFIG": kind(**config)}
