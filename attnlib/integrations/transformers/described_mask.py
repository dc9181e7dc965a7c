"""The description that a mask carries: that of a `MaskTensor`, or of a plain tensor.

The mask of a static cache is a plain tensor, because compiled code may take it. It keeps its
description as an attribute, which holds while nobody writes to the tensor.
"""

from __future__ import annotations

from weakref import ref

import torch

from attnlib.integrations.transformers.mask_tensor import MaskTensor
from attnlib.integrations.transformers.step_mask import StepMask

__all__ = ["describe_tensor", "known_step", "read_mask"]

_DESCRIPTION = "_attnlib_description"


def read_mask(mask: torch.Tensor | None) -> StepMask | torch.Tensor | None:
    """The description or the values of an attention mask.

    Returns:
        The `StepMask` of an unmodified `MaskTensor`; its values if the model wrote to them; any
        other mask as it is.
    """
    if type(mask) is not MaskTensor:
        step = known_step(mask)
        if step is not None:
            return step
        return mask.evaluated() if isinstance(mask, MaskTensor) else mask
    modified = mask.modified()
    return mask.step if modified is None else modified


def known_step(mask: torch.Tensor | None) -> StepMask | None:
    """The `StepMask` of an unmodified `MaskTensor` or described tensor; None for all else."""
    if type(mask) is MaskTensor:
        return mask.step if mask._cached is None or mask.modified() is None else None
    described: tuple[StepMask, int] | None = getattr(mask, _DESCRIPTION, None)
    if described is None or mask is None:
        return None
    writes = -1 if mask.is_inference() else mask._version  # `tensor_writes`, without its call
    return described[0] if writes == described[1] else None


def describe_tensor(mask: torch.Tensor, step: StepMask) -> torch.Tensor:
    """Keep the description of a mask that is a plain tensor with it, while it is not modified.

    Args:
        mask: the values of `step.dense()`; returned.
        step: the description.
    """
    step.described = ref(mask)  # the step must end with the mask
    writes = -1 if mask.is_inference() else mask._version  # `tensor_writes`, without its call
    setattr(mask, _DESCRIPTION, (step, writes))
    return mask
