"""FlashInfer's merges of attention over disjoint sets of keys; log-sum-exps are base 2."""

from __future__ import annotations

import math
from importlib import import_module

import torch

from attnlib.compat.flashinfer.arguments import check_tensors
from attnlib.errors import ContractError
from attnlib.ops.torch.softmax import merge_weights

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
    check_tensors(mask=mask)
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
    check_tensors(v=v, s=s)
    if v.dim() != 4 or s.shape != v.shape[:3] or not v.shape[1]:
        raise ContractError(
            f"v has shape {tuple(v.shape)} and s {tuple(s.shape)}; they must be "
            "[tokens, states, heads, head_dim] and [tokens, states, heads], with at least one state"
        )
    _check_dtypes(v=v, s=s)
    logs = s.masked_fill(s == torch.inf, -torch.inf)
    weights, relative = merge_weights(((logs - _largest(logs, 1)[:, None]) / LOG2_E).movedim(1, 0))
    weights = weights.movedim(0, 1)[..., None]
    # A state without keys may hold anything, NaN included.
    merged = torch.where(weights == 0, 0.0, v.float() * weights).sum(1)
    return merged.to(v.dtype), _largest(logs, 1) + relative * LOG2_E


def _largest(logs: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest base-2 LSE, from which states are measured: converted to natural logarithms, two
    large values are each rounded. 0 where no state has keys."""
    largest = logs.masked_fill(logs == torch.inf, -torch.inf).amax(dim)
    return largest.masked_fill(largest.isinf(), 0.0)


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
    largest = _largest(torch.stack([s_a, s_b]), 0)
    natural = torch.empty_like(largest)
    merge(v_a, (s_a - largest) / LOG2_E, v_b, (s_b - largest) / LOG2_E, out, natural)
    lse.copy_(largest + natural * LOG2_E)


def _check(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> None:
    check_tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    shapes = [tuple(x.shape) for x in (v_a, s_a, v_b, s_b)]
    if v_a.dim() != 3 or shapes != [shapes[0], shapes[0][:2]] * 2:
        raise ContractError(
            f"v_a, s_a, v_b and s_b have shapes {shapes}; they must be [tokens, heads, head_dim], "
            "[tokens, heads], and the same again"
        )
    _check_dtypes(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)


def _check_dtypes(**tensors: torch.Tensor) -> None:
    """Log-sum-exps are float32, and all tensors are on one device."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        is_lse = name.startswith("s")
        if (
            tensor.device != device
            or not tensor.is_floating_point()
            or (is_lse and tensor.dtype != torch.float32)
        ):
            wanted = "float32" if is_lse else "floating point"
            raise ContractError(
                f"{name} is {tensor.dtype} on {tensor.device}; it must be {wanted} on {device}"
            )
