"""Why the Hopper kernel over two key streams does not support a layer. Imports no triton."""

from __future__ import annotations

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.hopper.common_reasons import CallFeatures, Chip, feature_reasons
from attnlib.ops.triton.hopper.sizes import (
    BLOCK_SIZES,
    MOST_OWN_KEYS,
    STREAM_SIZES,
    latent_head_blocks,
)
from attnlib.ops.triton.hopper.support import latent_reasons

__all__ = ["streams_unsupported_reasons"]


def streams_unsupported_reasons(
    shape: LayerShape,
    features: CallFeatures,
    chip: Chip,
    window: tuple[int, int],
    chunk: int = 0,
    one_list_per_token: bool = True,
    causal: bool = True,
) -> list[str]:
    """Return why the Hopper kernel over two key streams does not support a layer; empty if it does.

    Args:
        shape: sizes and dtypes of the layer; any block size is read.
        features: what its calls use.
        chip: the chip.
        window: its sides, as in `AttentionParams`.
        chunk: tokens of an attention chunk, 0 without chunks.
        one_list_per_token: whether lists name single entries, for all heads of a query token.
        causal: whether queries see no later keys.
    """
    kernel = "Hopper kernel over two key streams"
    reasons = latent_reasons(kernel, shape._replace(block_size=BLOCK_SIZES[0]), chip, STREAM_SIZES)
    if not latent_head_blocks(shape.num_heads):
        reasons.append(
            f"{shape.num_heads} query heads; the {kernel} takes up to 64, or equal blocks of 33 to "
            "64"
        )
    sees_all = window[0] < 0 or (window[1] < 0 and not causal)
    if sees_all or max(window) >= MOST_OWN_KEYS or chunk:
        reasons.append(
            f"window {window} and chunks of {chunk}; the {kernel} takes windows of up to "
            f"{MOST_OWN_KEYS} tokens, without chunks"
        )
    if not one_list_per_token:
        reasons.append(f"lists of blocks, or per query head: not read by the {kernel}")
    return reasons + feature_reasons(kernel, features)
