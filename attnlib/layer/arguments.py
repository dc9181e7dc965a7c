"""The argument list of vLLM's layer (`Attention.from_arguments`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.spec import AttentionSpec, AttentionType

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = ["layer_from_arguments"]


def layer_from_arguments(
    cls: type[Attention],
    /,
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int | None = None,
    alibi_slopes: Sequence[float] | None = None,
    cache_config: Any = None,
    quant_config: Any = None,
    logits_soft_cap: float | None = None,
    per_layer_sliding_window: int | None = None,
    use_mla: bool = False,
    prefix: str = "",
    attn_type: str = AttentionType.DECODER.value,
    kv_sharing_target_layer_name: str | None = None,
    attn_backend: type[AttentionBackend] | None = None,
    *,
    dtype: torch.dtype | None = None,
    sinks: torch.Tensor | None = None,
    score_tensors: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    **spec_fields: Any,
) -> Attention:
    """The layer from vLLM's argument list.

    Args:
        cache_config: an object with `block_size` and `cache_dtype`; None means blocks of 16
            in the model's dtype.
        quant_config: not read. Scales are `k_scale` and `v_scale` of the layer or its cache.
        dtype: dtype of q, k, v; None means torch's default dtype.
        sinks, score_tensors, device: as in the class.
        spec_fields: more fields of `AttentionSpec`.
    """
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_size=head_size,
        dtype=dtype or torch.get_default_dtype(),
        kv_cache_dtype=getattr(cache_config, "cache_dtype", "auto"),
        block_size=getattr(cache_config, "block_size", None) or 16,
        attn_type=AttentionType(attn_type),
        sliding_window=per_layer_sliding_window,
        logits_soft_cap=logits_soft_cap or None,
        has_alibi=alibi_slopes is not None,
        has_sink=sinks is not None,
        use_mla=use_mla,
        **spec_fields,
    )
    return cls(
        spec,
        backend=attn_backend,
        scale=scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        score_tensors=score_tensors,
        kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        prefix=prefix,
        device=device,
    )
