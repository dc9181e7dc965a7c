"""What attnlib needs from vLLM's configuration objects, read by their attribute names.

No class of vLLM is imported: any object with these attributes works.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec, AttentionType
from attnlib.workspace import BatchLimits

__all__ = ["config_of", "layers_of", "runner_spec", "spec_of"]


def config_of(spec: AttentionSpec, limits: BatchLimits | None = None) -> Any:
    """An object with the attributes of a `vllm_config` that follow from a spec and limits: those
    that `spec_of` and `layers_of` read, and the limits of a scheduler."""
    seqs = tokens = longest = None
    if limits is not None:
        seqs, tokens, longest = limits.max_num_reqs, limits.max_num_tokens, limits.max_seq_len
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=spec.dtype,
            max_model_len=longest,
            get_num_attention_heads=lambda parallel_config=None: spec.num_heads,
            get_num_kv_heads=lambda parallel_config=None: spec.num_kv_heads,
            get_head_size=lambda: spec.head_size,
        ),
        cache_config=SimpleNamespace(block_size=spec.block_size, cache_dtype=spec.kv_cache_dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def spec_of(kv_cache_spec: Any, vllm_config: Any) -> AttentionSpec:
    """The spec for a KV cache spec of vLLM.

    Args:
        kv_cache_spec: an `AttentionSpec` of attnlib, which is returned, or an object with
            `block_size`, `num_kv_heads`, `head_size`, `dtype`, and optionally `use_mla` and
            `sliding_window`.
        vllm_config: has `model_config.get_num_attention_heads(parallel_config)`,
            `model_config.dtype` and `cache_config.cache_dtype`.

    Raises:
        ContractError: an attribute is missing.
    """
    if isinstance(kv_cache_spec, AttentionSpec):
        return kv_cache_spec
    model = _attribute(vllm_config, "model_config", "vllm_config")
    heads = _attribute(model, "get_num_attention_heads", "model_config")(
        getattr(vllm_config, "parallel_config", None)
    )
    cache = getattr(vllm_config, "cache_config", None)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=_attribute(kv_cache_spec, "num_kv_heads", "kv_cache_spec"),
        head_size=_attribute(kv_cache_spec, "head_size", "kv_cache_spec"),
        dtype=_attribute(model, "dtype", "model_config"),
        kv_cache_dtype=getattr(cache, "cache_dtype", "auto"),
        block_size=_attribute(kv_cache_spec, "block_size", "kv_cache_spec"),
        use_mla=bool(getattr(kv_cache_spec, "use_mla", False)),
        sliding_window=getattr(kv_cache_spec, "sliding_window", None),
    )


def runner_spec(runner: Any, attn_type: AttentionType = AttentionType.DECODER) -> AttentionSpec:
    """The spec of the attention layers of a v0 model runner.

    Args:
        runner: has `model_config` (`get_num_attention_heads`, `get_num_kv_heads`, `get_head_size`,
            `dtype`), `block_size`, and optionally `parallel_config` and `kv_cache_dtype`.
        attn_type: the role of the layers.

    Raises:
        ContractError: an attribute is missing.
    """
    model = _attribute(runner, "model_config", "runner")
    parallel = getattr(runner, "parallel_config", None)
    dtype: torch.dtype = _attribute(model, "dtype", "model_config")
    return AttentionSpec(
        num_heads=_attribute(model, "get_num_attention_heads", "model_config")(parallel),
        num_kv_heads=_attribute(model, "get_num_kv_heads", "model_config")(parallel),
        head_size=_attribute(model, "get_head_size", "model_config")(),
        dtype=dtype,
        kv_cache_dtype=getattr(runner, "kv_cache_dtype", None) or "auto",
        block_size=_attribute(runner, "block_size", "runner"),
        attn_type=attn_type,
    )


def layers_of(vllm_config: Any) -> Mapping[str, Any]:
    """The attention layers of a model by name, from `compilation_config.static_forward_context`.

    Args:
        vllm_config: a configuration object, or such a mapping itself.

    Raises:
        ContractError: an attribute is missing.
    """
    if isinstance(vllm_config, Mapping):
        return vllm_config
    compilation = _attribute(vllm_config, "compilation_config", "vllm_config")
    layers = _attribute(compilation, "static_forward_context", "compilation_config")
    return {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}


def _attribute(owner: Any, name: str, owner_name: str) -> Any:
    if not hasattr(owner, name):
        raise ContractError(
            f"{owner_name} ({type(owner).__name__}) has no attribute {name!r}: pass vLLM's object, "
            "or one with its attributes"
        )
    return getattr(owner, name)
