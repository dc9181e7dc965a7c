"""Arguments of kernels for their score functions (M10)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.launch.sequence import Source, batch_sources
from attnlib.score_functions.analysis import FAR
from attnlib.score_functions.function import MAX_TENSORS

__all__ = [
    "batch_score_values",
    "has_head_bounds",
    "has_short_ranges",
    "range_constants",
    "score_arguments",
    "score_constants",
    "score_signature",
    "tensor_sizes",
]


def score_constants(
    params: AttentionParams, language: str, has_raw: bool = False, takes_raw: bool = True
) -> dict[str, Any]:
    """The compile-time arguments of a kernel for its score function. Prefills take other BOUNDS
    (`range_constants`).

    Args:
        params: parameters of the call.
        language: "triton" or "gluon".
        has_raw: the kernel has the arguments RAW_SCORE and KEY_SLOPE.
        takes_raw: it may be given a function of raw products. Over a float8 cache, products have a
            scale per row besides the softmax scale.
    """
    constants: dict[str, Any] = {"SCORE": None, "BOUNDS": None}
    if has_raw:
        constants |= {"RAW_SCORE": False, "KEY_SLOPE": None}
    if params.score_function is None:
        return constants
    from attnlib.ops.triton.launch.score_compile import compile_score

    compiled = compile_score(params.score_function, language)
    constants |= {"SCORE": compiled.apply, "BOUNDS": compiled.bounds}
    in_products = takes_raw and not params.logits_soft_cap and params.scale > 0
    if has_raw and in_products and compiled.apply_raw is not None:
        constants |= {"SCORE": compiled.apply_raw, "RAW_SCORE": True}
        constants["KEY_SLOPE"] = compiled.key_slope
    return constants


def range_constants(
    params: AttentionParams, language: str, one_head: bool = False
) -> dict[str, Any]:
    """The compile-time arguments of a prefill kernel for the bounds of its score function.

    BOUNDS is `CompiledScore.ranges` or `head_ranges`, and RANGES the number of ranges that it
    returns, 0 without bounds. With EXACT, the bounds of each row replace the function.

    Args:
        params: parameters of the call.
        language: "triton" or "gluon".
        one_head: a tile has the rows of one query head (`has_head_bounds`).
    """
    function = params.score_function
    if function is None:
        return {"BOUNDS": None, "RANGES": 0, "EXACT": False}
    from attnlib.ops.triton.launch.score_compile import compile_score

    compiled = compile_score(function, language)
    bounds = compiled.head_ranges if one_head else compiled.ranges
    constants: dict[str, Any] = {"BOUNDS": bounds, "RANGES": function.count_ranges(one_head)}
    is_exact = function.exact_bounds and one_head == (function.head_bounds is not None)
    constants["EXACT"] = is_exact and constants["RANGES"] == 1
    return constants


def has_head_bounds(params: AttentionParams) -> bool:
    """Whether the keys that a query sees depend on its head, so that a tile has one head."""
    return params.score_function is not None and params.score_function.head_bounds is not None


_SHORT_RANGE, _SHORT_HEAD_RANGE = 1024, 2048
"""Keys of the longest range up to which ranges are short, for all heads and for bounds of one head.
Times with 64 and 128 keys per step on an H200: documents of 512 tokens 136 and 153 us, 1024 185 and
191, 2048 301 and 286, 8192 1075 and 939; windows of 128 to 2048 keys 215 and 288, of 8192 1081 and
934 (kernel notes)."""


def has_short_ranges(params: AttentionParams, one_head: bool) -> bool:
    """Whether the queries of a prefill probably see short ranges of keys.

    Ranges whose length only tensors on the device have, of documents and windows, count as short.

    Args:
        params: parameters of the call.
        one_head: a tile has the rows of one query head (`has_head_bounds`).
    """
    function = params.score_function
    if function is None:
        return False
    longest = function.longest_range()
    if one_head:
        return longest is None or longest <= _SHORT_HEAD_RANGE or longest >= FAR
    is_exact = function.exact_bounds and function.head_bounds is None
    if not is_exact or function.count_ranges() != 1:
        return False
    return longest is None or longest <= _SHORT_RANGE


def tensor_sizes(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Rows and columns of each tensor; a tensor of one dimension has one column."""
    return tuple(size for t in tensors for size in (t.shape[0], t.shape[1] if t.dim() > 1 else 1))


def score_arguments(
    layer_sizes: tuple[int, ...], num_batch_tensors: int, first: int
) -> tuple[tuple[Source | None, ...], tuple[Source | int | None, ...]]:
    """The arguments of a kernel for the tensors of a score function, besides layer tensors.

    Args:
        layer_sizes: `tensor_sizes` of the layer tensors.
        num_batch_tensors: number of batch tensors.
        first: number of the first of them among the values of a batch. Their sizes follow.

    Returns:
        (the batch tensors, the sizes of all tensors), each with None for tensors that the function
        does not have.
    """
    missing = MAX_TENSORS - len(layer_sizes) // 2 - num_batch_tensors
    tensors = batch_sources(num_batch_tensors, first)
    sizes = batch_sources(2 * num_batch_tensors, first + num_batch_tensors)
    return (*tensors, *[None] * missing), (*layer_sizes, *sizes, *[None] * (2 * missing))


def batch_score_values(tensors: tuple[Tensor, ...], direct: bool) -> tuple[Any, ...]:
    """The values of a batch for the sources of `score_arguments`.

    Args:
        tensors: batch tensors of the score function.
        direct: as addresses, for direct launches.
    """
    given = tuple(tensor.data_ptr() for tensor in tensors) if direct else tensors
    return *given, *tensor_sizes(tensors)


def score_signature(params: AttentionParams) -> tuple[Any, ...]:
    """What a launch follows from in the score function: the function and its layer tensors."""
    if params.score_function is None:
        return ()
    return params.score_function, *map(tensor_signature, params.layer_score_tensors())
