"""FlashInfer's merges of attention over disjoint sets of keys; log-sum-exps are base 2."""

from __future__ import annotations

import math
from importlib import import_module

import torch

from attnlib.errors import ContractError

__all__ = ["LOG2_E", "merge_state", "merge_state_in_place", "merge_states"]

LOG2_E = math.log2(math.e)
"""Factor from a natural to a base-2 logarithm."""


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over keys A with attention over keys B.

    Args:
        v_a, v_b: `[T, H, D]`, each normalized by its own softmax denominator.
        s_a, s_b: `[T, H]` float32, base-2 LSE; -inf for a state without keys.

    Returns:
        The merged output `[T, H, D]` in the dtype of `v_a`, and its base-2 LSE `[T, H]` float32.

    Raises:
        ContractError: the shapes disagree.
    """
    _check(v_a, s_a, v_b, s_b)
    out, lse = torch.empty_like(v_a), torch.empty_like(s_a, dtype=torch.float32)
    _merge(v_a, s_a, v_b, s_b, out, lse)
    return out, lse


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another state into `v` and `s`.

    Args:
        v, v_other: `[T, H, D]`; `v` is written.
        s, s_other: `[T, H]` float32, base-2 LSE; `s` is written.
        mask: `[T]` bool or uint8, the rows to merge; None for all.

    Raises:
        ContractError: the shapes disagree.
    """
    _check(v, s, v_other, s_other)
    if mask is None:
        _merge(v, s, v_other, s_other, v, s)
        return
    if mask.shape != v.shape[:1]:
        raise ContractError(f"mask has shape {tuple(mask.shape)}; it must be [{v.shape[0]}]")
    out, lse = merge_state(v, s, v_other, s_other)
    rows = mask.bool()
    v.copy_(torch.where(rows[:, None, None], out, v))
    s.copy_(torch.where(rows[:, None], lse, s))


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of states.

    Args:
        v: `[T, states, H, D]`.
        s: `[T, states, H]` float32, base-2 LSE.

    Returns:
        The merged output `[T, H, D]` in the dtype of `v`, and its base-2 LSE `[T, H]` float32.

    Raises:
        ContractError: the shapes disagree.
    """
    if v.dim() != 4 or s.shape != v.shape[:3]:
        raise ContractError(
            f"v has shape {tuple(v.shape)} and s {tuple(s.shape)}; they must be "
            "[tokens, states, heads, head_dim] and [tokens, states, heads]"
        )
    natural = s.float() / LOG2_E
    lse = torch.logsumexp(natural, 1)
    weights = torch.exp(natural - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])[..., None]
    # A state without keys may hold anything, NaN included.
    merged = torch.where(weights > 0, v.float() * weights, 0.0).sum(1)
    return merged.to(v.dtype), lse * LOG2_E


def _merge(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    counterpart = "triton" if out.is_cuda else "torch"
    merge = import_module(f"attnlib.ops.{counterpart}.merge_states").merge_states
    natural = torch.empty_like(lse)
    merge(v_a, s_a.float() / LOG2_E, v_b, s_b.float() / LOG2_E, out, natural)
    torch.mul(natural, LOG2_E, out=lse)


def _check(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (v_a, s_a, v_b, s_b)]
    if v_a.dim() != 3 or shapes != [shapes[0], shapes[0][:2]] * 2:
        raise ContractError(
            f"v_a, s_a, v_b and s_b have shapes {shapes}; they must be [tokens, heads, head_dim], "
            "[tokens, heads], and the same again"
        )
