"""Operations: functions of tensors, independent of specs, backends and metadata objects.

`ops.torch` and `ops.triton` are counterparts: modules with the same name define the same functions
with the same signatures, and the conformance suite compares their results. `params.AttentionParams`
holds the parameters that all attention operations share.

The names of this package are functions with the argument lists of other engines, and the
operations that serve them on the device of their tensors: Triton on a GPU, plain torch elsewhere.
They are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "AttentionParams": "attnlib.ops.params",
    "HeadNorm": "attnlib.ops.rotary",
    "PagedAttention": "attnlib.ops.paged_attention",
    "PagedAttentionMetadata": "attnlib.ops.paged_attention",
    "context_attention_fwd": "attnlib.ops.context_attention",
    "flash_attention_prefill": "attnlib.ops.minivllm",
    "get_block_size": "attnlib.ops.context_attention",
    "paged_attention_decode": "attnlib.ops.minivllm",
    "store_kvcache": "attnlib.ops.minivllm",
}
"""Name -> module that defines it."""

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from attnlib.ops.context_attention import context_attention_fwd as context_attention_fwd
    from attnlib.ops.context_attention import get_block_size as get_block_size
    from attnlib.ops.minivllm import flash_attention_prefill as flash_attention_prefill
    from attnlib.ops.minivllm import paged_attention_decode as paged_attention_decode
    from attnlib.ops.minivllm import store_kvcache as store_kvcache
    from attnlib.ops.paged_attention import PagedAttention as PagedAttention
    from attnlib.ops.paged_attention import PagedAttentionMetadata as PagedAttentionMetadata
    from attnlib.ops.params import AttentionParams as AttentionParams
    from attnlib.ops.rotary import HeadNorm as HeadNorm


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(
            f"module 'attnlib.ops' has no attribute {name!r}; its names are {', '.join(__all__)}"
        )
    value = getattr(import_module(module), name)
    globals()[name] = value  # later look-ups do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
