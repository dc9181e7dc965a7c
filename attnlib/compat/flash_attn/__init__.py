"""The functions of FlashAttention with its signatures, on the backend that attnlib selects.

`from attnlib.compat.flash_attn import ...` in place of `from flash_attn import ...` is enough.
Forward pass only.
"""

from attnlib.compat.flash_attn.arguments import FlashAttentionArgumentError
from attnlib.compat.flash_attn.dense import flash_attn_func
from attnlib.compat.flash_attn.kvcache import flash_attn_with_kvcache
from attnlib.compat.flash_attn.stacked import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from attnlib.compat.flash_attn.varlen import flash_attn_varlen_func

__all__ = [
    "FlashAttentionArgumentError",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
