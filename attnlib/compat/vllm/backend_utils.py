"""vLLM's v1 backend utilities: batch metadata, the builder base class, parameters of layers.

Differences from `attnlib.metadata`, all as in vLLM: `CommonAttentionMetadata` takes ten positional
arguments and fills unused slots of the caller's tensor with -1; builders take
`(kv_cache_spec, vllm_config, device)`; `get_per_layer_parameters` reads the layers from a
`vllm_config`; errors are AssertionErrors, too. attnlib makes the results.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from attnlib.cache import layout
from attnlib.compat.vllm.common_metadata import CommonAttentionMetadata
from attnlib.compat.vllm.layer_parameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from attnlib.compat.vllm.v1_builder import AttentionMetadataBuilder, M, make_builder
from attnlib.metadata.split import (
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from attnlib.metadata.transforms import make_local_attention_virtual_batches

__all__ = [
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "M",
    "PerLayerParameters",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "logger",
    "make_builder",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "set_kv_cache_layout",
    "split_decodes_and_prefills",
]

logger = logging.getLogger("attnlib")


def __getattr__(name: str) -> Any:
    """`_KV_CACHE_LAYOUT_OVERRIDE`, to be read: the present value."""
    if name == "_KV_CACHE_LAYOUT_OVERRIDE":
        return layout.kv_cache_layout_override()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_kv_cache_layout(cache_layout: str | None) -> None:
    """Set the layout of every later `PagedKVCache.allocate` without a `layout` argument.

    As in vLLM, `get_kv_cache_layout` returns it only after `get_kv_cache_layout.cache_clear()` if
    it has been called before.

    Args:
        cache_layout: the name of a layout; None removes the override.

    Raises:
        LayoutMismatchError: the name is unknown.
    """
    layout.set_kv_cache_layout(cache_layout)


@functools.lru_cache
def get_kv_cache_layout() -> str:
    """The layout set by `set_kv_cache_layout`, else by ATTNLIB_KV_CACHE_LAYOUT, else "NHD", which
    every layer of attnlib reads. Cached, as in vLLM."""
    return layout.get_kv_cache_layout() or "NHD"
