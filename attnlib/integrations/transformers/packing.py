"""Several sequences packed in one row, and the two ways in which transformers describes them.

From `position_ids` transformers builds a mask whose segments `patterns.recognize` finds. A caller
may also pass `cu_seq_lens_q` (the keyword of FlashAttention), which applies if the mask has no
segments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attnlib.errors import ContractError
from attnlib.integrations.transformers.patterns import MaskFunction
from attnlib.integrations.transformers.step_mask import StepMask

__all__ = ["segment_lengths", "with_callers_segments"]


def segment_lengths(segments: torch.Tensor, batch_size: int) -> list[int]:
    """Number of tokens of each packed sequence, row after row; no sequence crosses a row.

    Args:
        segments: `[B or 1, T]` integers, equal within one sequence.
        batch_size: B.
    """
    lengths: list[int] = []
    for row in segments.expand(batch_size, -1).cpu().numpy():
        ends = np.flatnonzero(np.diff(row)) + 1
        lengths += np.diff([0, *ends, len(row)]).tolist()
    return lengths


def with_callers_segments(step: StepMask, kwargs: dict[str, Any]) -> StepMask:
    """The mask with the caller's `cu_seq_lens_q` applied.

    Raises:
        ContractError: the offsets do not cover one row with as many queries as keys.
    """
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None or step.pattern is None or step.pattern.segments is not None:
        return step
    bounds: list[int] = starts.tolist()
    square = step.batch_size == 1 and step.q_length == step.kv_length
    if (
        not square
        or bounds[0] != 0
        or bounds[-1] != step.q_length
        or any(b < a for a, b in zip(bounds, bounds[1:], strict=False))
    ):
        raise ContractError(
            f"cu_seq_lens_q={bounds} packs sequences into a batch of {step.batch_size} x "
            f"{step.q_length} queries over {step.kv_length} keys; it must increase from 0 to the "
            f"length of a single row without a cache: pass use_cache=False, or leave it out"
        )
    numbers = torch.arange(len(bounds) - 1, device="cpu")
    lengths = torch.tensor(bounds, device="cpu").diff()
    segments = torch.repeat_interleave(numbers, lengths)[None]
    return replace(
        step,
        pattern=step.pattern._replace(segments=segments),
        mask_function=_within(segments, step),
        plans={},
    )


def _within(segments: torch.Tensor, step: StepMask) -> MaskFunction | None:
    """The mask function with the segments, for evaluation."""
    if step.mask_function is None:
        return None
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    combined: MaskFunction = and_masks(
        step.mask_function, packed_sequence_mask_function(segments.to(step.device))
    )
    return combined
