"""Biases and sinks that models compute for each query token: Inkling (M21, M22).

The attention modules of these models pass a bias `[B, Hq, T, S]`, which depends on the query token
and the distance, and Inkling 2 also sinks `[B, Hq, T, 1]`. Kernels apply both as tensors of the
call. A step of a `PagedModel` has keys that the bias does not cover, so that the modules that make
it return one column for each distance (`by_distance`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.paged_calls import LOCAL
from attnlib.score_functions import QueryTensors, ScoreFunction
from attnlib.score_functions.builtin import relative_logits

__all__ = [
    "attend_single_tokens",
    "by_distance",
    "checked_sinks",
    "is_by_token",
    "query_tensors",
    "spread_bias",
    "token_fields",
]

_ATTENTION = frozenset(
    (
        "InklingAttention",
        "Inkling2SlidingAttention",
        "Inkling2FullAttention",
        "Inkling2LoopSlidingAttention",
        "Inkling2LoopFullAttention",
    )
)
_BIASES = frozenset(("InklingRelativeLogits", "Inkling2RelativePositionBias"))
_WITHIN_TOKENS = frozenset(
    (
        "Inkling2BlockAttentionResidual",
        "Inkling2LoopBlockAttentionResidual",
        "Inkling2LoopMessageAttentionResidual",
    )
)


def is_by_token(module: nn.Module) -> bool:
    """Whether a module passes a bias by query token and distance. What stands for it in a graph of
    torch.compile has no extent."""
    return type(module).__name__ in _ATTENTION and hasattr(module, "rel_extent")


def checked_sinks(
    module: nn.Module, query: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The sinks of a call: one per query head, or of the query tokens; None for none.

    Raises:
        UnsupportedConfigError: sinks of query tokens of another model.
    """
    sinks: torch.Tensor | None = kwargs.get("s_aux")
    sinks = kwargs.get("sinks") if sinks is None else sinks
    if sinks is not None and sinks.numel() != query.shape[1] and not is_by_token(module):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: the sinks have shape {tuple(sinks.shape)}, attnlib supports "
            f"one per query head, [{query.shape[1]}]; use attn_implementation='eager'"
        )
    return sinks


def token_fields(module: Any, sinks: torch.Tensor | None) -> dict[str, Any]:
    """The fields of the spec of such a module.

    Args:
        module: the module.
        sinks: of the call, or None.
    """
    return {
        "score_function": _function(int(module.rel_extent)),
        "token_sinks": sinks is not None,
        "has_sink": False,
    }


@lru_cache(maxsize=32)
def _function(extent: int) -> ScoreFunction:
    return relative_logits(extent)


def query_tensors(
    bias: torch.Tensor, sinks: torch.Tensor | None, rows: torch.Tensor | None = None
) -> QueryTensors:
    """The tensors of a call in the order of its packed queries.

    Args:
        bias: `[B, Hq, T, E]`, a column for each distance.
        sinks: `[B, Hq, T, 1]`, or None.
        rows: indices of the queries among the B * T; None for all.
    """
    given = [bias, sinks] if sinks is not None else [bias]
    packed = [x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3]) for x in given]
    if rows is not None:
        packed = [x.index_select(0, rows) for x in packed]
    first, *rest = (x.contiguous() for x in packed)
    return QueryTensors({"rel": first}, *rest)


def spread_bias(bias: torch.Tensor, extent: int, first: int) -> torch.Tensor:
    """The bias of each distance, `[B, Hq, T, E]`, of a bias over keys.

    Args:
        bias: `[B, Hq, T, S]`.
        extent: E.
        first: column of the first query's own key.
    """
    queries, device = bias.shape[2], bias.device
    own = torch.arange(first, first + queries, device=device)[:, None]
    columns = (own - torch.arange(extent, device=device)).clamp_(min=0)
    return bias.gather(-1, columns.expand(*bias.shape[:2], -1, -1))


@contextmanager
def by_distance(model: nn.Module) -> Iterator[None]:
    """Context in which, in a step of a `PagedModel`, biases of the model have one column for each
    distance, `[1, Hq, T, E]`."""
    hooks = []
    try:
        for module in model.modules():
            if type(module).__name__ in _BIASES:
                hooks.append(module.register_forward_pre_hook(_distances))
            elif type(module).__name__ == "InklingAttention":
                hooks.append(module.register_forward_pre_hook(_positions, with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _distances(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Arguments for which the bias of every query has the distances 0 to E - 1."""
    if getattr(LOCAL, "model", None) is None:
        return None
    states, second, third = arguments
    columns = torch.arange(module.rel_extent, device=states.device)
    if type(module).__name__ == "InklingRelativeLogits":  # positions of queries and of keys
        return states, torch.zeros_like(second), -columns
    return states, columns.expand(states.shape[1], -1), third  # distances, positions


class _StepPositions:
    """Stands for the cache of a module in a step: it tells the positions of the queries. Keys,
    values and states of convolutions pass through.

    Args:
        position_ids: `[T]`.
    """

    def __init__(self, position_ids: torch.Tensor) -> None:
        self._position_ids = position_ids

    def get_mask_sizes(self, q_length: int, layer_idx: int) -> tuple[int, int]:
        return q_length, 0

    def get_query_offset(self, layer_idx: int) -> torch.Tensor:
        """What the module adds to the index of a token in the row."""
        ids = self._position_ids
        return ids - torch.arange(len(ids), device=ids.device)

    def update(self, key: Any, value: Any, layer_idx: int, **kwargs: Any) -> tuple[Any, Any]:
        return key, value

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """What convolutions ask before transformers 5.24."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return states


def _positions(module: Any, arguments: Any, kwargs: dict[str, Any]) -> Any:
    """Let a module, which scales by positions, see those of a packed row."""
    step = kwargs.get("attnlib_step")
    if step is None or step.is_discovery:
        return None
    if module.is_sliding or module.config.log_scaling_n_floor is None:
        return None
    if step.position_ids is None:
        raise UnsupportedConfigError(
            f"{layer_name(module)} scales by positions, which this step does not have: pass "
            "position_ids to PagedModel.step"
        )
    name = "past_key_values" if "past_key_values" in kwargs else "cache"  # before transformers 5.24
    return arguments, {**kwargs, name: _StepPositions(step.position_ids)}


def attend_single_tokens(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor | None:
    """Attention of a module within each token, `[B, T, N, D]` over `[B, T, S, D]`, which has no
    cache and few states per token.

    Returns:
        `[B, N, T, D]`; None for other modules.
    """
    if type(module).__name__ not in _WITHIN_TOKENS:
        return None
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()
