"""Backends with a wrong operation that no attention layer runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.backends.torch import TorchBackend
from attnlib.ops.torch import append_kv, context_attention, merge_states, packed_attention, slots

__all__ = ["OtherOperation", "WRONG_OPERATIONS"]


class OtherOperation(TorchBackend):
    """Has another operation `run` in place of the one named `replaced`."""

    replaced: ClassVar[str]
    run: ClassVar[Callable[..., Any]]

    @classmethod
    def get_operation(cls, name: str) -> Callable[..., Any] | None:
        return cls.run if name == cls.replaced else super().get_operation(name)


class SlotsPastTheTable(OtherOperation):
    """Gives positions past the block table a slot of its last block."""

    replaced = "compute_slot_mapping"

    @staticmethod
    def run(
        starts: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor, size: int, *more: Any
    ) -> torch.Tensor:
        return slots.compute_slot_mapping(
            starts, seq_lens.clamp(max=table.shape[1] * size), table, size, *more
        )


class AppendsToTheFirstRequest(OtherOperation):
    """Appends all tokens behind the number of tokens that the first request has."""

    replaced = "append_kv"

    @staticmethod
    def run(*args: Any) -> None:
        *tensors, lengths, after = args
        append_kv.append_kv(*tensors, lengths[:1].expand_as(lengths).contiguous(), after)
        after.copy_(lengths + args[0].shape[1])


class EqualWeights(OtherOperation):
    """Merges two states with equal weights."""

    replaced = "merge_states"

    @staticmethod
    def run(
        out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, *more: torch.Tensor
    ) -> None:
        mean = (out_a.nan_to_num() + out_b.nan_to_num()) / 2
        merge_states.merge_states(out_a, lse_a, out_b, *more)
        more[1].copy_(mean)


class ContextWithoutWindow(OtherOperation):
    """Ignores the window in sequences that lie anywhere."""

    replaced = "context_attention"

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        *tensors, params = args
        wide = replace(params, window=(-1, -1))
        context_attention.context_attention(*tensors, wide, **kwargs)


class NewKeysScaled(OtherOperation):
    """Multiplies new keys by the scale of the cached ones."""

    replaced = "packed_prefill"

    @staticmethod
    def run(query: torch.Tensor, key: torch.Tensor, *more: Any, **kwargs: Any) -> None:
        scale = more[6].k_scale
        factor = scale[:, None] if isinstance(scale, torch.Tensor) and scale.dim() else scale
        packed_attention.packed_prefill(query, key * factor, *more, **kwargs)


WRONG_OPERATIONS: dict[str, tuple[type[AttentionBackend], str]] = {
    "slots past the block table": (SlotsPastTheTable, "K8"),
    "appended behind the first request": (AppendsToTheFirstRequest, "A6"),
    "states merged with equal weights": (EqualWeights, "L4"),
    "no window in sequences with gaps": (ContextWithoutWindow, "A3"),
    "new keys with the scale of the cache": (NewKeysScaled, "A4"),
}
"""Error -> the wrong backend and the check that is meant to detect it."""
