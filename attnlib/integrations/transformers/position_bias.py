"""Position biases that depend on the distance only: T5 and models like it.

transformers passes such a bias as a tensor `[1, Hq, T, S]`, computed in the first layer of a stack
and handed on to the others. If its diagonals are constant, which is checked once per tensor, it is
the score function `relative_bias` with one value per head and distance, and kernels apply it.
"""

from __future__ import annotations

import threading
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnlib.integrations.transformers.layers import Call, is_capturing
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.layer import Attention
from attnlib.score_functions import ScoreFunction
from attnlib.score_functions.builtin import relative_bias
from attnlib.spec import AttentionType, MaskKind, Window

__all__ = ["distance_fields", "is_by_distance", "is_zero", "keeps_distances", "load_distances"]

_MAX_READ = 4
"""Tensors of which the checks are remembered: a decoder hands on two, one for its own keys and one
for those of the encoder."""

_local = threading.local()


class _Read(NamedTuple):
    """What the values of a bias showed.

    Attributes:
        source: the tensor.
        version: its version counter at the time; -1 where it has none.
        zero: all values are 0.
        by_distance: all diagonals are constant.
    """

    source: weakref.ref[torch.Tensor]
    version: int
    zero: bool
    by_distance: bool


def is_zero(bias: torch.Tensor) -> bool:
    """Whether the bias is known to be 0, as for the keys of an encoder.

    The values are read for several queries only: decode steps do not wait for the device.
    """
    return _may_read(bias) and _read(bias).zero


def is_by_distance(call: Call, step: StepMask, bias: torch.Tensor) -> bool:
    """Whether kernels can apply the bias as a function of the distance.

    Args:
        call: the attention call.
        step: its mask, which kernels can apply.
        bias: `[B or 1, Hq or 1, T or 1, S]`.
    """
    pattern = step.pattern
    sizes = (1, call.query.shape[1], call.query.shape[2], call.key.shape[2])
    if pattern is None or tuple(bias.shape) != sizes or step.kv_offset > 0 or _is_special(pattern):
        return False
    if not pattern.causal and step.q_length != step.kv_length:
        return False  # distances to keys of another sequence
    if bias.shape[2] == 1:
        # Every bias of one query depends on the distance. Padding has to be read.
        return step.attention_mask is None and not is_capturing(bias.device)
    if not _may_read(bias) or not _read(bias).by_distance:
        return False
    return keeps_distances(step)


def keeps_distances(step: StepMask) -> bool:
    """Whether the requests of a step, without their padding, have the distances of its columns."""
    pattern = step.pattern
    if pattern is None or _is_special(pattern):
        return False
    rows = step.rows()
    return rows is None or (
        rows.contiguous and not rows.interleaved and not (pattern.causal and rows.trailing.any())
    )


def _is_special(pattern: Pattern) -> bool:
    special = (pattern.spans, pattern.segments, pattern.chunk)
    return any(part is not None for part in special)


def distance_fields(step: StepMask, keys: int) -> dict[str, Any]:
    """Fields of the spec of a layer with such a bias.

    Args:
        step: the mask.
        keys: S of the call; layers for different S share kernels up to the next power of two.
    """
    assert step.pattern is not None  # `is_by_distance` has checked
    causal, window = step.pattern.causal, step.pattern.window
    return {
        "attn_type": AttentionType.DECODER,
        "mask_kind": MaskKind.CAUSAL if causal else MaskKind.BIDIRECTIONAL,
        "window": None if window in (Window(), Window(None, 0)) else window,
        "score_function": _function(max(64, 1 << (keys - 1).bit_length())),
    }


def load_distances(layer: Attention, step: StepMask, bias: torch.Tensor) -> None:
    """Fill the layer tensor `bias` of `relative_bias` from a bias by distance.

    Args:
        layer: a layer with `distance_fields`.
        step: the mask.
        bias: `[1, Hq, T, S]`.
    """
    (table,) = layer.impl.layer_score_tensors
    queries, keys = bias.shape[2:]
    # The first row has the distances first - j, the first column first + i.
    first = step.q_offset - step.kv_offset
    values = torch.cat([bias[0, :, 0].flip(1), bias[0, :, 1:, 0]], dim=1)
    begin = table.shape[1] // 2 + first - (keys - 1)
    table[:, begin : begin + queries + keys - 1].copy_(values)


@lru_cache(maxsize=32)
def _function(max_distance: int) -> ScoreFunction:
    return relative_bias(max_distance)


def _may_read(bias: torch.Tensor) -> bool:
    return bias.dim() == 4 and bias.shape[2] > 1 and not is_capturing(bias.device)


def _read(bias: torch.Tensor) -> _Read:
    """What the values show; they are read once per tensor."""
    known: list[_Read] = _local.__dict__.setdefault("biases", [])
    version = -1 if bias.is_inference() else bias._version
    for read in known:
        if read.source() is bias and read.version == version:
            return read
    same = (bias[..., 1:, 1:] == bias[..., :-1, :-1]).all()
    zero, by_distance = torch.stack([(bias == 0).all(), same]).tolist()
    read = _Read(weakref.ref(bias), version, zero, by_distance)
    known.insert(0, read)
    del known[_MAX_READ:]
    return read
