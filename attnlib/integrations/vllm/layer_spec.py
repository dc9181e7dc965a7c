"""vLLM's description of an attention layer as an `AttentionSpec`, and reasons against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.platforms import current_platform

from attnlib.backends.base import AttentionBackend
from attnlib.errors import AttnlibError, BackendUnavailableError, UnsupportedConfigError
from attnlib.integrations.vllm.format_names import is_page_name, stored_fields
from attnlib.integrations.vllm.masks import Mask, masked_spec
from attnlib.selection import get_attn_backend
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, AttentionType

__all__ = [
    "ATTENTION_TYPES",
    "KV_CACHE_DTYPES",
    "PROBE_HEADS",
    "refuse_arguments",
    "rejections",
    "select",
    "spec_of",
    "spec_of_layer",
]

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of `--kv-cache-dtype` that attnlib reads, besides those of `page_backend`. Each is also a
value of `AttentionSpec.kv_cache_dtype`."""

ATTENTION_TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")

_MASKS = {
    "use_mm_prefix": Mask.SPANS,
    "use_rswa": Mask.RETAINED,
    "use_non_causal": Mask.FULL,
}
"""vLLM's questions about masks that depend on the batch."""

PROBE_WINDOW = 128
"""A window of any size: vLLM says only whether there is one, and every backend that has windows has
all sizes."""

PROBE_HEADS = 1
"""Heads of the spec for vLLM's first question, which does not say how many a layer has."""


def spec_of(question: Mapping[str, Any]) -> AttentionSpec:
    """The spec for the arguments of vLLM's `validate_configuration`.

    Raises:
        ContractError: no attention layer can have these values.
    """
    size = question["head_size"]
    latent: dict[str, Any] = {}
    if question.get("use_mla"):
        config = get_current_vllm_config().model_config.hf_text_config
        latent = {"use_mla": True, "head_size_v": size - config.qk_rope_head_dim}
        if question.get("use_sparse"):
            latent["key_selection"] = KeySelection(max_blocks=config.index_topk)
    return AttentionSpec(
        num_heads=PROBE_HEADS,
        num_kv_heads=PROBE_HEADS,
        head_size=size,
        **latent,
        dtype=question["dtype"],
        **stored_fields(
            question.get("kv_cache_dtype") or "auto", get_current_vllm_config_or_none()
        ),
        block_size=question.get("block_size") or 16,
        attn_type=AttentionType(question.get("attn_type", "decoder")),
        sliding_window=PROBE_WINDOW if question.get("has_sliding_window") else None,
        has_sink=bool(question.get("has_sink")),
        batch_invariant=bool(question.get("use_batch_invariant")),
        needs_lse=bool(question.get("use_dcp")),
        kv_scale_kind="head" if question.get("use_per_head_quant_scales") else "tensor",
    )


def spec_of_layer(*, kv_cache_dtype: str, **fields: Any) -> AttentionSpec:
    """The spec of a layer from its arguments and vLLM's configuration. The latter alone says that
    a checkpoint has one scale per KV head.

    Args:
        kv_cache_dtype: as the user names it.
        fields: further fields of the spec.
    """
    config = get_current_vllm_config()
    scheme = getattr(config.quant_config, "kv_cache_scheme", None) or {}
    stored = stored_fields(kv_cache_dtype, config)
    scaled = kv_cache_dtype.startswith("fp8") and not is_page_name(kv_cache_dtype)
    per_head = scaled and scheme.get("strategy") == "attn_head"
    return AttentionSpec(
        dtype=torch.get_default_dtype(),
        **stored,
        kv_scale_kind="head" if per_head else "tensor",
        block_size=config.cache_config.block_size or 16,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        **fields,
    )


def select(spec: AttentionSpec, layer_name: str = "") -> type[AttentionBackend]:
    """attnlib's backend for a layer on vLLM's device: ATTNLIB_BACKEND, else by priority.

    Raises:
        AttnlibError: as `get_attn_backend`.
    """
    device = torch.device(current_platform.device_type)
    return get_attn_backend(spec, None, device, layer_name=layer_name)


def refuse_arguments(kind: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a layer for which there is no implementation, unless they are None.

    Raises:
        UnsupportedConfigError: with the names of the arguments.
    """
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise UnsupportedConfigError(
            f"attnlib has no {kind} with {', '.join(given)} in vLLM: use another attention backend "
            "for this model",
            reasons=[f"{name} is not supported" for name in given],
        )


def _is_divided(question: Mapping[str, Any]) -> bool:
    """Whether the ranks of a group have a part of the cache each. vLLM 0.26 does not say."""
    config = get_current_vllm_config_or_none()
    size = 1 if config is None else config.parallel_config.decode_context_parallel_size
    return bool(question.get("use_dcp")) or size > 1


def rejections(question: Mapping[str, Any]) -> list[str]:
    """Every reason why attnlib cannot serve such layers; empty if it can."""
    try:
        spec = spec_of(question)
        select(spec)
        masks = [mask for key, mask in _MASKS.items() if question.get(key)]
        if _is_divided(question):
            if masks:
                return [f"attnlib: no decode context parallelism with {masks[0].value} masks"]
            if spec.scales_in_page:
                return [
                    "attnlib: no decode context parallelism with pages of "
                    f"{spec.kv_cache_dtype}: choose auto or fp8"
                ]
        for mask in masks:
            select(masked_spec(spec, mask, retained=PROBE_WINDOW))
    except (UnsupportedConfigError, BackendUnavailableError) as error:
        return [f"attnlib: {reason}" for reason in error.rejections or (error,)]
    except AttnlibError as error:
        return [f"attnlib: {error}"]
    return []
