"""The layer of a spec as the operations describe it: sizes, dtypes and features.

Imports no triton.
"""

from __future__ import annotations

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["call_features", "layer_shape"]


def layer_shape(spec: AttentionSpec) -> LayerShape:
    """Sizes and dtypes of layers with this spec, without a bias of the query span."""
    score = spec.score_function
    return LayerShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        query_dtype=spec.dtype,
        cache_dtype=spec.kv_dtype,
        block_size=spec.block_size,
        score_tiles=0 if score is None else score.count_tile_lookups(),
        latent=spec.use_mla,
        page_format=spec.kv_format if spec.scales_in_page else None,
        value_format=None if spec.value_format == spec.kv_format else spec.value_format,
    )


def call_features(spec: AttentionSpec) -> CallFeatures:
    """What the calls of such layers use; scales of the cache are numbers."""
    return CallFeatures(
        causal_per_request=spec.mask_kind is MaskKind.PER_REQUEST,
        alibi=spec.has_alibi,
        query_bias=spec.mask_kind is MaskKind.QUERY_BIAS,
        score_function=spec.score_function is not None,
        query_tensors=bool(spec.score_function and spec.score_function.query_tensors),
        token_sinks=spec.token_sinks,
    )
