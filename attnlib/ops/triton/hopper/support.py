"""Why a Hopper kernel does not support a layer: pure functions of the layer and the chip.

Imports no triton, so that `attnlib explain` can name the kernels of a layer on any machine.
"""

from __future__ import annotations

import torch

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.shared_decode import PRODUCT_ROWS
from attnlib.ops.triton.hopper.common_reasons import (
    DECODE,
    CallFeatures,
    Chip,
    feature_reasons,
    layer_reasons,
)
from attnlib.ops.triton.hopper.sizes import (
    BLOCK_SIZES,
    DECODE_ROWS,
    FLOAT8,
    GATHERED_SIZES,
    LATENT_ROWS,
    LATENT_SIZES,
    QUANTIZED,
    ROWS,
    SHARED_HEAD_SIZE,
    SMALL_SIZES,
    decode_rows,
    latent_head_blocks,
)

__all__ = [
    "decode_unsupported_reasons",
    "invariant_unsupported_reasons",
    "latent_reasons",
    "latent_unsupported_reasons",
    "packed_latents_unsupported_reasons",
    "prefill_unsupported_reasons",
    "selected_latents_unsupported_reasons",
    "shared_decode_unsupported_reasons",
]


def prefill_unsupported_reasons(shape: LayerShape, features: CallFeatures, chip: Chip) -> list[str]:
    """Return why the Hopper prefill does not support a layer; empty if it does.

    Args:
        shape: sizes and dtypes of the layer.
        features: what its calls use.
        chip: the chip.
    """
    kernel, group, widest = "Hopper prefill", shape.group, max(shape.head_sizes)
    reasons = layer_reasons(kernel, shape, chip, small_sizes=SMALL_SIZES)
    if group > ROWS:
        reasons.append(f"{group} query heads per KV head; the {kernel} takes at most {ROWS}")
    if shape.block_size in GATHERED_SIZES and 128 < shape.head_size <= 192:
        reasons.append(
            f"keys have head size {shape.head_size}, which are kept in parts; the {kernel} gathers "
            f"undivided rows over blocks of {shape.block_size}"
        )
    if widest > 256 and 64 % group:
        reasons.append(
            f"{group} query heads per KV head; with head sizes above 256, the {kernel} takes "
            "divisors of 64"
        )
    if widest > 256 and features.score_function:
        reasons.append(f"score function: the {kernel} takes none with head sizes above 256")
    if features.query_tensors:  # 36 accesses in its loop over keys, where 24 are the limit of tests
        reasons.append(f"tensors of query tokens: the {kernel} would keep scores in local memory")
    if shape.cache_dtype in FLOAT8:
        features = features._replace(tensor_scales=False)
    return reasons + feature_reasons(kernel, features)


def decode_unsupported_reasons(
    shape: LayerShape, features: CallFeatures, chip: Chip, max_query_len: int = 1
) -> list[str]:
    """Return why the Hopper decode does not support a batch; empty if it does.

    Args:
        shape: sizes and dtypes of the layer.
        features: what its calls use.
        chip: the chip.
        max_query_len: upper bound of the query lengths, in tokens.
    """
    reasons = layer_reasons(DECODE, shape, chip, small_sizes=SMALL_SIZES)
    stored = shape.page_format
    most = decode_rows(shape.head_size_v, shape.value_dtype, stored)
    if shape.group * max_query_len > most:
        reasons.append(
            f"{shape.group} query heads per KV head times {max_query_len} query tokens; the "
            f"{DECODE} takes at most {most} rows with head size {shape.head_size_v}"
        )
    if shape.num_kv_heads > chip.num_sms:
        reasons.append(
            f"{shape.num_kv_heads} KV heads; the {DECODE} takes at most one per multiprocessor, "
            f"{chip.num_sms}"
        )
    if stored is not None and stored.elements_per_group and features.score_function:
        reasons.append(f"score function: the {DECODE} takes none over {stored.name}")
    if shape.cache_dtype in QUANTIZED:
        features = features._replace(tensor_scales=False)
    return reasons + feature_reasons(DECODE, features)


def invariant_unsupported_reasons(
    shape: LayerShape, features: CallFeatures, chip: Chip
) -> list[str]:
    """Return why the batch-invariant Hopper kernels do not support a layer; empty if they do. No
    argument depends on a batch.

    Args:
        shape: sizes and dtypes of the layer.
        features: what its calls use.
        chip: the chip.
    """
    kernel = "batch-invariant Hopper kernels"
    reasons = layer_reasons(kernel, shape, chip)
    if shape.cache_dtype in FLOAT8:
        reasons.append(
            f"the cache has dtype {shape.cache_dtype}; the {kernel} need that of the query"
        )
    if shape.group > DECODE_ROWS:
        reasons.append(
            f"{shape.group} query heads per KV head; the {kernel} take at most {DECODE_ROWS}"
        )
    if shape.num_kv_heads > chip.num_sms:
        reasons.append(f"{shape.num_kv_heads} KV heads; the {kernel} take at most {chip.num_sms}")
    if features.score_function:
        reasons.append(f"score function: not supported by the {kernel}")
    if shape.latent:
        reasons.append(f"values that are a prefix of the keys: not supported by the {kernel}")
    return reasons + feature_reasons(kernel, features)


def shared_decode_unsupported_reasons(shape: LayerShape, chip: Chip) -> list[str]:
    """Return why the Hopper decode of shared prefixes does not support a layer; empty if it does.

    Args:
        shape: sizes and dtypes of the layer.
        chip: the chip.
    """
    kernel = "Hopper decode of shared prefixes"
    reasons = layer_reasons(kernel, shape, chip)
    if shape.cache_dtype != shape.query_dtype:
        reasons.append(
            f"the cache has dtype {shape.cache_dtype}; the {kernel} needs that of the query"
        )
    if max(shape.head_sizes) > SHARED_HEAD_SIZE:
        reasons.append(
            f"head sizes {shape.head_sizes}; the {kernel} takes up to {SHARED_HEAD_SIZE}"
        )
    if shape.group > PRODUCT_ROWS:
        reasons.append(f"{shape.group} query heads per KV head; the {kernel} takes {PRODUCT_ROWS}")
    if shape.num_kv_heads > chip.num_sms:
        reasons.append(f"{shape.num_kv_heads} KV heads; the {kernel} takes at most {chip.num_sms}")
    return reasons


def latent_unsupported_reasons(shape: LayerShape, features: CallFeatures, chip: Chip) -> list[str]:
    """Return why the Hopper kernel over latents, of decodes and prefills, does not support a layer;
    empty if it does.

    Args:
        shape: sizes and dtypes of the layer.
        features: what its calls use.
        chip: the chip.
    """
    kernel = "Hopper kernel over latents"
    reasons = latent_reasons(kernel, shape, chip)
    if shape.cache_dtype in FLOAT8:
        features = features._replace(tensor_scales=False)
    if not latent_head_blocks(shape.num_heads):
        reasons.append(
            f"{shape.num_heads} query heads; the {kernel} takes up to {LATENT_ROWS}, or equal "
            f"blocks of 33 to {LATENT_ROWS}"
        )
    return reasons + feature_reasons(kernel, features)


def packed_latents_unsupported_reasons(
    shape: LayerShape, features: CallFeatures, chip: Chip
) -> list[str]:
    """`latent_unsupported_reasons` for packed latents (P14); `shape` has the dtype of the elements
    of the values."""
    reasons = latent_unsupported_reasons(shape, features, chip)
    if shape.query_dtype != torch.bfloat16:
        reasons.append(
            f"query has dtype {shape.query_dtype}; the Hopper kernel over packed latents takes "
            "bfloat16, the dtype of a part of them"
        )
    return reasons


def selected_latents_unsupported_reasons(
    shape: LayerShape, features: CallFeatures, chip: Chip, one_list_per_token: bool = True
) -> list[str]:
    """Return why the Hopper kernel over selected latents does not support a layer; empty if it
    does.

    Args:
        shape: sizes and dtypes of the layer; any block size is read.
        features: what its calls use.
        chip: the chip.
        one_list_per_token: whether all heads of a query token share a list that no other token has.
    """
    kernel = "Hopper kernel over selected latents"
    reasons = latent_reasons(kernel, shape._replace(block_size=BLOCK_SIZES[0]), chip)
    if shape.cache_dtype in FLOAT8:
        reasons.append(
            f"the cache has dtype {shape.cache_dtype}; the {kernel} needs that of the query"
        )
    if not latent_head_blocks(shape.num_heads):
        reasons.append(
            f"{shape.num_heads} query heads; the {kernel} takes up to 64, or equal blocks of 33 to "
            "64"
        )
    if not one_list_per_token:
        reasons.append(f"lists per query head or shared by query tokens: not read by the {kernel}")
    return reasons + feature_reasons(kernel, features)


def latent_reasons(
    kernel: str, shape: LayerShape, chip: Chip, sizes: tuple[int, int] = LATENT_SIZES
) -> list[str]:
    """The reasons that the kernels over latents share."""
    usual = shape._replace(head_size=64, head_size_v=64)  # sizes of latents are checked below
    reasons = layer_reasons(kernel, usual, chip)
    if shape.head_sizes != sizes:
        reasons.append(f"head sizes {shape.head_sizes}; the {kernel} takes {sizes}")
    if shape.num_kv_heads != 1:
        reasons.append(f"{shape.num_kv_heads} KV heads; the {kernel} takes one")
    return reasons
