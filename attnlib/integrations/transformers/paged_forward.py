"""The forward of a `PagedModel` in one step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from attnlib.integrations.transformers.paged_calls import paged_forward
from attnlib.integrations.transformers.paged_refusals import unreached_layers
from attnlib.integrations.transformers.paged_step import PagedStep
from attnlib.integrations.transformers.shared_layers import computed_for, needed_rows

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_batches import StepBatch
    from attnlib.integrations.transformers.paged_model import PagedModel
    from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["run_model", "run_step"]


def run_step(
    paged: PagedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    batch: StepBatch,
    one: CommonAttentionMetadata,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """The logits of a step; arguments and errors as in `PagedModel.step`.

    Args:
        one: a batch with the lengths of the step.
    """
    needed, shared = None, paged.shared_layers
    if paged.shares and rows is None:
        # Gemma 4 would replace the mask by a slice of it if it got no tensor.
        rows = torch.arange(input_ids.shape[0], device="cpu")
    elif shared and rows is not None:
        needed = needed_rows(one, rows, input_ids.device)
    if needed is not None:  # Gemma 4 selects no rows of a part, so `kept` is applied below
        rows = torch.arange(needed.rows.shape[0], device="cpu")
    step = PagedStep(paged, batch, needed, position_ids)
    fewer: Any = nullcontext()
    if needed is not None:
        fewer = computed_for(shared, needed.rows, input_ids.shape[0])
    with fewer:
        logits = run_model(step, input_ids, position_ids, rows)
    return logits if needed is None else logits[needed.kept]


def run_model(
    step: PagedStep,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits `[n or T, vocabulary]` of the tokens in `rows`, or of all.

    Raises:
        UnsupportedConfigError: an attention layer did not receive the step.
    """
    paged = step.paged
    selected = {} if rows is None else {"logits_to_keep": rows.to(input_ids.device)}
    model: Any = paged.model
    with paged_forward(model), paged.states.running(step):
        out = model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            attnlib_step=step,
            **selected,
        )
    known = {*paged.attention.by_module, *paged.states.modules}
    if not step.reached or step.reached != known:
        raise unreached_layers(model, len(step.reached), len(known))
    logits: torch.Tensor = out.logits[0]
    return logits
