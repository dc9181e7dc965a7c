"""APIs of other packages, on top of attnlib's backend selection.

Names are imported on first use, so this package costs nothing until one of them is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "flash_attn_func": "attnlib.compat.flash_attn",
    "flash_attn_varlen_func": "attnlib.compat.flash_attn",
    "flash_attn_with_kvcache": "attnlib.compat.flash_attn",
    "register_flash_attention_impl": "attnlib.compat.flash_attn.torch_registry",
    "get_kv_cache_layout": "attnlib.cache.layout",
    "set_kv_cache_layout": "attnlib.cache.layout",
    "spec_from_vllm_arguments": "attnlib.selection.vllm_arguments",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from attnlib.cache.layout import get_kv_cache_layout as get_kv_cache_layout
    from attnlib.cache.layout import set_kv_cache_layout as set_kv_cache_layout
    from attnlib.compat.flash_attn import flash_attn_func as flash_attn_func
    from attnlib.compat.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from attnlib.compat.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
    from attnlib.compat.flash_attn.torch_registry import (
        register_flash_attention_impl as register_flash_attention_impl,
    )
    from attnlib.selection.vllm_arguments import (
        spec_from_vllm_arguments as spec_from_vllm_arguments,
    )


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(
            f"module 'attnlib.compat' has no attribute {name!r}; its public names are "
            f"{', '.join(__all__)}"
        )
    value = getattr(import_module(module), name)
    globals()[name] = value  # later look-ups do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
