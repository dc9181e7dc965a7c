"""Which layers are alike for a tuning table: those whose kernels have the same shapes and features.

How many heads a rank holds is left out, so that a table serves every degree of tensor parallelism; how many query heads share a KV head is not.
"""

from __future__ import annotations

from typing import Any

from attnlib.spec import AttentionSpec, AttentionType, MaskKind

__all__ = ["layer_class"]


def layer_class(spec: AttentionSpec) -> dict[str, Any]:
    """The class of a layer as plain JSON values, the same for all layers that are alike."""
    told = [
        (spec.attn_type is not AttentionType.DECODER, spec.attn_type.value),
        (spec.mask_kind is not MaskKind.CAUSAL, spec.mask_kind.value),
        (tuple(spec.visible_window) not in ((None, None), (None, 0)), "window"),
        (spec.attention_chunk_size is not None, "chunks"),
        (spec.logits_soft_cap is not None, "soft cap"),
        (spec.has_alibi, "alibi"),
        (spec.has_sink, "sinks"),
        (spec.use_mla, "mla"),
    ]
    return {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(spec.kv_dtype).removeprefix("torch."),
        "group_size": spec.group_size,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "block_size": spec.block_size,
        "features": [word for holds, word in told if holds],
    }
