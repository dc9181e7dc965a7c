"""Classes of layers in tuning tables: layers whose kernels have the same shapes and features are in
one class.

The number of heads per rank is not part of the class, so that one table serves every degree of
tensor parallelism. The number of query heads per KV head is. Scales per tensor and per head are in
one class: the same kernels read the same bytes. Formats with scales in the page are classes of
their own, whatever the dtype of their elements. State layers have the same fields: the dtype of the
cache is that of their states, and they have no blocks.
"""

from __future__ import annotations

from typing import Any

from attnlib.kv_dtype import format_pair
from attnlib.spec import AttentionSpec, AttentionType, LayerSpec, MaskKind, StateSpec

__all__ = ["layer_class"]


def layer_class(spec: LayerSpec) -> dict[str, Any]:
    """The class of a layer as JSON values; equal for all layers of one class."""
    if isinstance(spec, StateSpec):
        return _state_class(spec)
    assert isinstance(spec, AttentionSpec)
    features = [
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
        "kv_cache_dtype": format_pair(spec.kv_format, spec.value_format) or spec.kv_format.name,
        "group_size": spec.group_size,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "block_size": spec.block_size,
        "features": [name for used, name in features if used],
    }


def _state_class(spec: StateSpec) -> dict[str, Any]:
    features = [
        (spec.has_recurrence, spec.update),
        (spec.has_recurrence, f"decay per {spec.decay}"),
        (spec.max_rollback > 0, "drafts"),
        (spec.batch_invariant, "batch-invariant"),
    ]
    return {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(spec.state_dtype).removeprefix("torch."),
        "group_size": spec.num_heads // max(spec.num_key_heads, 1),
        "head_size": spec.key_size,
        "head_size_v": spec.value_size,
        "block_size": 0,
        "features": ["states", *(name for used, name in features if used)],
    }
