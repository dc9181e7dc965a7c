"""Windows and biases of single heads, and biases of query tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import lookup, maximum, sqrt, where
from attnlib.score_functions.query_tensors import query_row

__all__ = ["alibi_sqrt", "head_windows", "relative_bias", "relative_logits", "t5_relative_bias"]


def head_windows(smallest: int = 1, largest: int = 1 << 30) -> ScoreFunction:
    """A window for each head. Layer tensor `window` `[Hq]` int32: visible keys, including the
    query's own. The layer is causal.

    Args:
        smallest, largest: bounds of the windows, which limit the keys that decodes read.
    """
    return ScoreFunction(
        _head_windows,
        constants=(("smallest", smallest), ("largest", largest)),
        layer_tensors=("window",),
        bounds=_head_windows_bounds,
        head_bounds=_one_window_bounds,
        exact_bounds=True,
        examples=_head_window_examples,
    )


def _head_windows(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return where(q_pos - k_pos < lookup(aux.window, head), score, float("-inf"))


def _head_windows_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return q_first - aux.largest + 1, seq_len, q_last - aux.smallest + 1, seq_len


def _one_window_bounds(
    q_first: Any, q_last: Any, seq_len: Any, head: Any, request: Any, aux: Any
) -> Any:
    window = lookup(aux.window, head)
    return q_first - window + 1, seq_len, q_last - window + 1, seq_len


def _head_window_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    return {"window": torch.arange(1, 1 + 5 * num_heads, 5, dtype=torch.int32, device="cpu")}


def relative_bias(max_distance: int = 128) -> ScoreFunction:
    """A bias by head and distance, as in T5. Layer tensor `bias` `[Hq, 2 * max_distance + 1]`:
    column `max_distance + d` is the bias of a key d positions before the query; larger distances
    use the columns at the edges. `t5_relative_bias` makes it from the weights of a model.

    Args:
        max_distance: largest distance with a bias of its own.
    """
    return ScoreFunction(
        _relative_bias,
        constants=(("max_distance", max_distance),),
        layer_tensors=("bias",),
        examples=_relative_bias_examples,
    )


def _relative_bias(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score + lookup(aux.bias, head, q_pos - k_pos + aux.max_distance)


def _relative_bias_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    columns = torch.arange(257, dtype=torch.float32, device="cpu")
    heads = torch.arange(1, num_heads + 1, device="cpu")[:, None]
    return {"bias": torch.sin(columns * 0.3 * heads) * 2.0}


def t5_relative_bias(
    weight: Tensor, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """The tensor `bias` `[Hq, 2 * max_distance + 1]` of `relative_bias` for a T5 model.

    Args:
        weight: `[num_buckets, Hq]`, floating point, the embedding of the relative position buckets.
        bidirectional: for an encoder: later keys have buckets of their own.
        num_buckets: `relative_attention_num_buckets` of the model.
        max_distance: `relative_attention_max_distance` of the model.
    """
    later = -torch.arange(-max_distance, max_distance + 1, device=weight.device)  # k - q
    buckets = torch.zeros_like(later)
    if bidirectional:
        num_buckets //= 2
        buckets = torch.where(later > 0, num_buckets, 0)
        distance = later.abs()
    else:
        distance = (-later).clamp(min=0)
    exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    buckets = buckets + torch.where(distance < exact, distance, large)
    return weight[buckets].T.contiguous()


def alibi_sqrt() -> ScoreFunction:
    """ALiBi with the square root of the distance. Layer tensor `slope` `[Hq]` float32."""
    return ScoreFunction(_alibi_sqrt, layer_tensors=("slope",), examples=_slope_examples)


def _alibi_sqrt(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score - lookup(aux.slope, head) * sqrt(abs(q_pos - k_pos))


def _slope_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    heads = torch.arange(1, num_heads + 1, dtype=torch.float32, device="cpu")
    return {"slope": 2.0 ** (-8.0 * heads / num_heads)}


def relative_logits(extent: int = 64) -> ScoreFunction:
    """A bias by query token, head and distance, as in Inkling. Query tensor `rel`
    `[T, Hq * extent]`: column `head * extent + d` is the bias of the key d positions before the
    query. Later keys and those at `extent` and farther have none.

    Args:
        extent: distances with a bias.
    """
    return ScoreFunction(
        _relative_logits,
        constants=(("extent", extent),),
        query_tensors=("rel",),
        bounds=_relative_logits_bounds,
        examples=_relative_logits_examples,
    )


def _relative_logits(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    distance = q_pos - k_pos
    row = query_row(aux.query_row, request, q_pos)
    bias = lookup(aux.rel, row, head * aux.extent + distance)
    return score + where((distance >= 0) & (distance < aux.extent), bias, 0.0)


def _relative_logits_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return 0, seq_len, 0, maximum(q_first - aux.extent + 1, 0)


def _relative_logits_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    rows = torch.arange(sum(seq_lens), dtype=torch.float32, device="cpu")[:, None]
    columns = torch.arange(num_heads * 64, dtype=torch.float32, device="cpu")
    return {"rel": torch.sin(rows * 0.7 + columns * 0.3) * 2.0}
