"""Decodes whose caller combines the splits of their keys."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attnlib.backends.step_plan import forward_signature
from attnlib.backends.triton.launches import LayerCall
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.plan import TritonPlan
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.split_states import SplitStates

__all__ = ["forward_uncombined"]


class UncombinedPlan(TritonPlan):
    """The launches of one kind of call, without that of a combine kernel."""

    uncombined: ClassVar[bool] = True

    def splits(self, call: LayerCall) -> SplitStates | None:
        """What a run of this call has left; None where all states are complete."""
        decodes, splits = self._batch.decodes, getattr(self._launches.decode, "splits", None)
        if decodes is None or splits is None or not self._launches.reads(call):
            return None
        found: SplitStates | None = splits(decodes)
        return found


def forward_uncombined(
    self: Any,  # a `TritonImpl`, whose method this is
    query: torch.Tensor,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> SplitStates | None:
    """`AttentionImpl.forward` of an `early` batch, but states of several splits are returned, and
    not in `output` and `lse`; None if all are there."""
    call = LayerCall(query, None, None, cache, output, lse)
    signature = ("uncombined", *forward_signature(self, query, cache, output, lse))
    plan: UncombinedPlan | None = metadata.plans.get(signature)
    if plan is None:
        plan = UncombinedPlan(self, signature, call, metadata, self._kernels)
        metadata.plans[signature] = plan
    plan.run(self, query, None, None, cache, output, lse)
    return plan.splits(call)
