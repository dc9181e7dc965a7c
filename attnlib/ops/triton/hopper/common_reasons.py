"""The reasons against a kernel that all Hopper kernels share.

Imports no triton, so that `attnlib explain` can name the kernels of a layer on any machine.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.hopper.sizes import BLOCK_SIZES, FLOAT8, GATHERED_SIZES, QUANTIZED, WIDEST

__all__ = ["DECODE", "CallFeatures", "Chip", "feature_reasons", "layer_reasons"]

DECODE = "Hopper decode"
"""Name of the kernel that also reads caches of integers."""


class Chip(Protocol):
    """What support depends on in a chip; `DeviceLimits` has it."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""

    @property
    def num_sms(self) -> int:
        """Multiprocessors."""


class CallFeatures(NamedTuple):
    """What a call uses that some kernels do not have.

    Attributes:
        causal_per_request: a flag for each request instead of one for the batch.
        alibi: ALiBi slopes.
        query_bias: a bias of the query span.
        tensor_scales: a scale of the cache is a tensor.
        score_function: scores are changed before the mask is applied (M10).
        query_tensors: the score function reads tensors of query tokens (M21).
        token_sinks: sinks of query tokens (M22).
    """

    causal_per_request: bool = False
    alibi: bool = False
    query_bias: bool = False
    tensor_scales: bool = False
    score_function: bool = False
    query_tensors: bool = False
    token_sinks: bool = False

    @classmethod
    def of(cls, params: AttentionParams) -> CallFeatures:
        """The features of a call with these parameters."""
        function = params.score_function
        return cls(
            causal_per_request=isinstance(params.causal, Tensor),
            alibi=params.alibi_slopes is not None,
            query_bias=params.query_bias is not None,
            tensor_scales=isinstance(params.k_scale, Tensor) or isinstance(params.v_scale, Tensor),
            score_function=function is not None,
            query_tensors=function is not None and bool(function.query_tensors),
            token_sinks=params.has_token_sinks,
        )


def layer_reasons(
    kernel: str, shape: LayerShape, chip: Chip, small_sizes: tuple[int, ...] = ()
) -> list[str]:
    """The reasons that all kernels share.

    Args:
        kernel: its name.
        shape: sizes and dtypes of the layer.
        chip: the chip.
        small_sizes: block sizes besides `BLOCK_SIZES` that it takes over 16-bit caches, and the
            decode over float8.
    """
    dtype, cache_dtype = shape.query_dtype, shape.cache_dtype
    is_quantized = cache_dtype in (QUANTIZED if kernel == DECODE else FLOAT8)
    reasons, (major, minor) = [], chip.capability
    if major != 9:
        reasons.append(f"compute capability {major}.{minor}; the {kernel} needs 9.0")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"query has dtype {dtype}; the {kernel} takes float16 and bfloat16")
    if cache_dtype != dtype and not is_quantized:
        reasons.append(
            f"the cache has dtype {cache_dtype} and query {dtype}; the {kernel} needs them equal "
            "or a float8 cache"
        )
    in_4_bits = torch.uint8 in (cache_dtype, shape.value_dtype)
    if is_quantized and in_4_bits and shape.head_sizes != (128, 128):
        reasons.append(f"head sizes {shape.head_sizes}; the {kernel} takes 128 over 4-bit elements")
    reasons += _head_size_reasons(kernel, shape, is_quantized, bool(small_sizes))
    takes_small = not is_quantized or (kernel == DECODE and cache_dtype in FLOAT8)
    takes_small &= shape.page_format is None
    sizes = (*small_sizes, *BLOCK_SIZES) if takes_small else BLOCK_SIZES
    if shape.block_size not in sizes:
        taken = ", ".join(map(str, sizes))
        reasons.append(f"block_size {shape.block_size}; the {kernel} takes {taken}")
    return reasons


def _head_size_reasons(
    kernel: str, shape: LayerShape, is_quantized: bool, takes_wide: bool
) -> list[str]:
    multiple = 16 if is_quantized else 8  # rows of the cache are read in units of 16 bytes
    is_wide = takes_wide and not is_quantized and shape.block_size not in GATHERED_SIZES
    most = WIDEST if is_wide else 256
    over = f" over a cache of {shape.cache_dtype}" if is_quantized else ""
    return [
        f"{name} have head size {size}; the {kernel} takes multiples of {multiple} in "
        f"[64, {most}]{over}"
        for name, size in zip(("keys", "values"), shape.head_sizes, strict=True)
        if not 64 <= size <= most or size % multiple
    ]


def feature_reasons(kernel: str, features: CallFeatures) -> list[str]:
    """The reasons against what a call uses; score functions differ between kernels."""
    reasons = []
    if features.causal_per_request:
        reasons.append(f"causal per request: the {kernel} takes one flag for the batch")
    if features.alibi:
        reasons.append(f"alibi_slopes: not supported by the {kernel}")
    if features.query_bias:
        reasons.append(f"query_bias: not supported by the {kernel}")
    if features.token_sinks:
        reasons.append(f"sinks of query tokens: not supported by the {kernel}")
    if features.tensor_scales:
        reasons.append(f"k_scale or v_scale as tensors: the {kernel} reads a cache without scales")
    return reasons
