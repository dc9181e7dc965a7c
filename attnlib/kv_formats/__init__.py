"""Formats of keys and values in a cache: the declaration, the library's own ones, and those of
packages."""

from attnlib.kv_formats.builtin import PAGE_FORMATS
from attnlib.kv_formats.declaration import KVFormat, plain_format
from attnlib.kv_formats.registry import (
    find_kv_format,
    installed_kv_formats,
    load_kv_format,
    load_kv_formats,
    register_kv_format,
    unregister_kv_format,
)

__all__ = [
    "KVFormat",
    "PAGE_FORMATS",
    "find_kv_format",
    "installed_kv_formats",
    "load_kv_format",
    "load_kv_formats",
    "plain_format",
    "register_kv_format",
    "unregister_kv_format",
]
