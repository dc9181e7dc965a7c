"""The metadata of state layers, and its builder, which all backends share."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attnlib.capabilities import StateCapabilities
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.checks import check_batch
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.form import check_slots_form
from attnlib.ops.states import StateBatch
from attnlib.spec import StateSpec

__all__ = ["StateMetadata", "StateMetadataBuilder"]


@dataclass(kw_only=True)
class StateMetadata(AttentionMetadata):
    """One batch over slots of state layers.

    What is not listed is as in `CommonAttentionMetadata`.

    Attributes:
        state_slots: `[R]` int32 device; the slot of each request, -1 for padding (T7).
        state_sources: `[R]` int32 device; the slot that each request reads (T12), or None for its
            own.
    """

    slot_mapping: Tensor | None = None
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor | None
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    state_slots: Tensor
    state_sources: Tensor | None = None

    def with_slots(self, state_slots: Tensor, state_sources: Tensor | None = None) -> StateMetadata:
        """The same batch over other slots, for a layer whose states are in other blocks; they share
        plans.

        Args:
            state_slots, state_sources: `[R]` int32 on the device of the batch.

        Raises:
            ContractError: tensors of another form.
        """
        reqs, device = self.state_slots.shape[0], self.state_slots.device
        check_slots_form("state_slots", state_slots, reqs, device)
        if state_sources is not None:
            check_slots_form("state_sources", state_sources, reqs, device)
        changes = {"state_slots": state_slots, "state_sources": state_sources}
        other: StateMetadata = StateMetadata.from_fields({**self.__getstate__(), **changes})
        other.__dict__["plans"] = self.plans
        return other

    @functools.cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What backends derive from lengths and slots, by keys of their own."""
        return {}

    @functools.cached_property
    def batch(self) -> StateBatch:
        """The batch for the operations of `attnlib.ops`."""
        return StateBatch(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            slots=self.state_slots,
            sources=self.state_sources,
            max_query_len=self.max_query_len,
        )


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Builds `StateMetadata` for any backend, without a host sync.

    Args:
        spec: of the layers.
        device: where they run.
        capabilities: of the backend, for graphs and lengths on the host.
        kwargs: further arguments of `AttentionMetadataBuilder`.
    """

    spec: StateSpec  # type: ignore[assignment]  # the base class builds for attention layers

    def __init__(
        self,
        spec: StateSpec,
        device: torch.device | str | None = None,
        *,
        capabilities: StateCapabilities | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec, device, **kwargs)  # type: ignore[arg-type]  # as above
        self.capabilities = capabilities or StateCapabilities()
        self.clone_settings = {"capabilities": self.capabilities}
        # Of the backend, and not of this class as in other builders.
        self.needs_host_lengths = self.capabilities.needs_host_lengths  # type: ignore[misc]
        if self.capabilities.cudagraph:
            self.cudagraph_support = self.capabilities.cudagraph  # type: ignore[misc]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StateMetadata:
        """The metadata of one batch; see `AttentionMetadataBuilder.build`.

        Raises:
            ContractError: the batch has no `state_slots`.
        """
        common = common_attn_metadata
        if self.needs_host_lengths:
            common = self.with_host_lengths(common)
        check_batch(common, self.spec, needs_host_lengths=self.needs_host_lengths)
        found: dict[str, Any] = {name: getattr(common, name) for name in _FIELDS}
        found["slot_mapping"] = None
        return StateMetadata.from_fields(found)  # type: ignore[no-any-return]

    def update_block_table(
        self, metadata: StateMetadata, block_table: Tensor, slot_mapping: Tensor | None
    ) -> StateMetadata:
        """The metadata of the same batch for a layer with other slots.

        Args:
            metadata: of the batch.
            block_table: `[R]` int32 slots, or `[R, n]` with the slot of each request first.
            slot_mapping: not read.
        """
        slots = block_table if block_table.dim() == 1 else block_table[:, 0]
        return metadata.with_slots(slots)


_INHERITED = {field.name for field in fields(AttentionMetadata)}
_FIELDS = [field.name for field in fields(StateMetadata) if field.name not in _INHERITED]
