"""The attention and mask functions while torch.compile traces a model.

An attention call becomes one operator (`opaque`), and a mask the tensor that sdpa gets, which the
compiler evaluates; the operator recognizes it by its values. What the operator does not serve is
called outside of the graph: with `fullgraph=True` that is an error, which names the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attnlib.integrations.transformers.autocast import as_eager_casts
from attnlib.integrations.transformers.eager_models import (
    calls_need_masks,
    is_causal_module,
    take_masks_of_numbers,
)
from attnlib.integrations.transformers.opaque import attend_opaquely
from attnlib.integrations.transformers.recorded_weights import weights_are_recorded_in_trace
from attnlib.integrations.transformers.token_terms import is_by_token

__all__ = ["REASONS", "evaluated_mask", "is_compiled", "traced_attention", "untraced_reason"]

REASONS = {
    "attnlib_step": "a step of PagedModel runs over plans on the host",
    "write_index": "generate_batch runs over plans on the host",
    "cu_seq_lens_q": "the lengths in cu_seq_lens_q= are read on the host: leave it out",
    "indices": "selected keys are read on the host",
    "block_indices": "selected keys are read on the host",
    "output_attentions": "attention weights are computed outside of graphs",
    "dropout": "attnlib computes inference only: call model.eval()",
    "training": "attnlib computes inference only: call model.eval()",
    "mask": "the mask was made outside of the compiled code, as a description of it",
    "sinks": "sinks per token are not supported",
}
"""What torch.compile cannot trace, and why."""


def is_compiled() -> bool:
    """Whether torch.compile traces the caller, and not torch.export."""
    # Dynamo of torch 2.10 and 2.11 takes `torch.compiler.is_exporting()` for True.
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag


_ARGUMENTS = (
    "attnlib_step",
    "write_index",
    "cu_seq_lens_q",
    "indices",
    "block_indices",
    "output_attentions",
)


def untraced_reason(
    module: nn.Module, query: torch.Tensor, mask: Any, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Why a call cannot be one operator of a graph, a key of `REASONS`; None if it can.

    Args:
        module, query, mask, dropout, kwargs: of the attention function.
    """
    sinks = kwargs.get("s_aux")
    sinks = kwargs.get("sinks") if sinks is None else sinks
    for name in _ARGUMENTS:
        if kwargs.get(name) is not None and kwargs.get(name) is not False:
            return name
    if weights_are_recorded_in_trace():
        return "output_attentions"
    if dropout:
        return "dropout"
    if module.training and torch.is_grad_enabled() and query.requires_grad:
        return "training"
    if mask is not None and type(mask) is not torch.Tensor:
        return "mask"
    if sinks is not None and (is_by_token(module) or sinks.numel() != query.shape[1]):
        return "sinks"
    return None


def traced_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scale: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The attention call as one operator, `[B, T, Hq, Dv]`."""
    query, key, value = as_eager_casts(query, key, value)
    causal, sinks = kwargs.get("is_causal"), kwargs.get("s_aux")
    sinks = kwargs.get("sinks") if sinks is None else sinks
    causal = is_causal_module(module) if causal is None else bool(causal)
    out: torch.Tensor = attend_opaquely(
        query,
        key,
        value,
        attention_mask,
        kwargs.get("position_bias"),
        sinks,
        scale,
        kwargs.get("softcap"),
        kwargs.get("sliding_window"),
        causal,
        type(module).__name__,
    )
    return out


def evaluated_mask(given: dict[str, Any]) -> torch.Tensor | None:
    """The mask of transformers for sdpa: `[B, 1, T, S]` bool, or None where causality says all; for
    models that may add it to scores themselves that of eager attention.

    Args:
        given: arguments of the mask function.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if given.get("mask_function") is None:
        given = given | {"mask_function": causal_mask_function}
    # Without a mask, the last query is at the last key; for sdpa the first is at the first.
    is_suffix, config = given["q_length"] != given["kv_length"], type(given.get("config"))
    if given["q_length"] != 1 and (is_suffix or calls_need_masks(config.__module__)):
        given = given | {"allow_is_causal_skip": False}
    mask: torch.Tensor | None = sdpa_mask(**given)
    if mask is not None and take_masks_of_numbers(config.__module__):
        dtype = given["dtype"]
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask
