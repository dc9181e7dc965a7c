"""A KV format for attnlib in its own package."""

from attnlib_kv_format_example.rotated4 import ROTATED_4BIT

__all__ = ["ROTATED_4BIT"]
