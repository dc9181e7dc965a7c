"""Implementations in vLLM's style: constructed from sizes, called with the layer and its cache.

    impl = impl_cls(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                    kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name,
                    **extra_impl_args)
    output = impl.forward(layer, query, key, value, kv_cache, attn_metadata[, output=output])

`forward` may also be that of `attnlib.AttentionImpl`, behind such a constructor.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from attnlib.backends.base import AttentionImpl

__all__ = ["has_vllm_constructor", "has_vllm_forward", "impl_class_of", "run_impl"]


def impl_class_of(backend: Any) -> Any:
    """The impl class of a backend; None for a name, and if it cannot be imported, which selection
    reports."""
    try:
        return backend.get_impl_cls() if hasattr(backend, "get_impl_cls") else None
    except ImportError:
        return None


def has_vllm_constructor(impl_cls: Any) -> bool:
    """Whether an impl class is constructed from sizes instead of from a spec."""
    if not issubclass(impl_cls, AttentionImpl):
        return True
    return "num_heads" in inspect.signature(impl_cls).parameters


def has_vllm_forward(impl_cls: Any) -> bool:
    """Whether `forward` of an impl class takes the layer, keys and values, and writes them."""
    if not issubclass(impl_cls, AttentionImpl):
        return True
    return "layer" in inspect.signature(impl_cls.forward).parameters


def run_impl(
    impl: Any,
    layer: object,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: object,
    attn_metadata: object,
    output: torch.Tensor,
) -> None:
    """Call `forward` of an impl in vLLM's style.

    One with the argument `output` gets tensors per head, like the layer of vLLM v1 passes them. One
    without gets flat tensors, and its result is copied to `output`.

    Args:
        impl: of the layer.
        layer: has `_q_scale`, `_k_scale` and `_v_scale`.
        query, key, value: `[T, heads, head size]`; key and value may be None.
        kv_cache: of the form that the impl reads.
        attn_metadata: of the batch.
        output: `[T, Hq, Dv]`, written.
    """
    cls: Any = type(impl)
    if _takes_output(cls):
        result = impl.forward(layer, query, key, value, kv_cache, attn_metadata, output=output)
    else:
        flat = (x if x is None else x.flatten(1) for x in (query, key, value))
        result = impl.forward(layer, *flat, kv_cache, attn_metadata)
    if result is not None and result.data_ptr() != output.data_ptr():
        output.copy_(result.view(output.shape))


@functools.lru_cache(maxsize=256)  # a signature takes longer to read than to call a small impl
def _takes_output(impl_cls: Any) -> bool:
    return "output" in inspect.signature(impl_cls.forward).parameters
