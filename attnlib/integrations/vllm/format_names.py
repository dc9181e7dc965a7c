"""Names of formats with scales in the page (M16) as values of `--kv-cache-dtype`."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.kv_dtype import PAGE_FORMATS

__all__ = ["register_formats"]


def register_formats() -> None:
    """Let `--kv-cache-dtype` take the formats that vLLM does not know. Up to 0.26 it takes no other
    names than its own."""
    from vllm.config import cache

    if not hasattr(cache, "register_kv_cache_dtype"):
        return
    for name, stored in PAGE_FORMATS.items():
        if not cache.is_known_kv_cache_dtype(name):
            cache.register_kv_cache_dtype(name)(_handler(name, stored.dtype))


def _handler(name: str, dtype: torch.dtype) -> type:
    """What vLLM asks about a format that it does not know."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        def __init__(self) -> None:
            self.name = name

        def torch_dtype(self) -> torch.dtype:
            return dtype

        def quant_mode(self) -> Any:
            # This mode stands for any format with scales in the page: no scales are loaded. CUSTOM
            # is an alias of OCTAVE_K3V4 in vLLM 0.33, so that `is_octave` is true for it.
            return KVQuantMode.INT8_PER_TOKEN_HEAD

    return Handler
