"""The buffers that the CUDA graphs of a `PagedModel` read, and the step that is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnlib.integrations.transformers.mixer_layers import MixerLayer
from attnlib.integrations.transformers.paged_batches import StepBatch
from attnlib.integrations.transformers.paged_step import PagedStep
from attnlib.layer import Attention
from attnlib.metadata.state import AttentionState
from attnlib.metadata.states import StateMetadata
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["BufferGroup", "CapturedStep", "DecodeBuffers"]


class BufferGroup(NamedTuple):
    """The buffers of layers that share a batch.

    Attributes:
        name: of their group in a pool, or None.
        state: of their batches.
        slots: of states in a pool, `[L, 2, R]` int32: the slots and the sources of each layer.
    """

    name: str | None
    state: AttentionState[Any]
    slots: torch.Tensor | None = None

    def fill(self, batch: StepBatch, size: int) -> None:
        """Copy the batch of a step, padded to a size."""
        given: Any = batch[self.name] if isinstance(batch, Mapping) else batch  # type: ignore[index]
        if self.slots is not None:
            count = given.batch.num_reqs
            self.slots[:, :, count:size].fill_(-1)
            for row, found in enumerate((given.slots, given.sources or given.slots)):
                self.slots[:, row, :count].copy_(torch.stack(found))
            given = given.batch
        padded = self.state.begin_forward(given, size)
        self.state.builder.build(0, padded)

    def metadata(self, size: int) -> list[Any]:
        """Metadata over the buffers, one for each layer in a pool of states, to capture with."""
        first: Any = self.state.graph_capture_get_metadata_for_batch(size)
        if self.slots is None:
            return [first]
        self.slots.fill_(-1)
        return [first.with_slots(slots[:size], sources[:size]) for slots, sources in self.slots]


class DecodeBuffers:
    """What all graphs of a model read: tokens, positions, and the batches of its groups. Also in
    inference mode, they are tensors that other modes can write."""

    @torch.inference_mode(False)
    def __init__(self, paged: PagedModel, limits: BatchLimits, device: torch.device) -> None:
        self.paged, self.limits, self.device = paged, limits, device
        self.ids = torch.zeros(limits.max_num_reqs, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.groups: dict[Any, BufferGroup] = {}
        self.stream: Any = None
        self.pool: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # by torch
            self.pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode(False)
    def of_layer(self, layer: Attention, name: str | None) -> BufferGroup:
        """The group of an attention layer."""
        key = (layer.backend, layer.spec)
        if key not in self.groups:
            builder = self.paged.builder_of(layer)
            state = layer.backend.get_state_cls()(builder, self.limits)
            self.groups[key] = BufferGroup(name, state)
        return self.groups[key]

    @torch.inference_mode(False)
    def of_states(self, one: MixerLayer) -> BufferGroup:
        """The group of a state layer."""
        name = None if one.place is None else one.place.group
        key = (one.layer.backend, name)
        if key not in self.groups:
            backend, slots = one.layer.backend, None
            builder = backend.make_builder(one.layer.spec, self.device, limits=self.limits)
            if name is not None:
                count = self.paged.groups[name].num_layers
                # Rows of each layer at multiples of 16 bytes, as launches without checks need them.
                width = -(-self.limits.max_num_reqs // 4) * 4
                slots = torch.full((count, 2, width), -1, dtype=torch.int32, device=self.device)
            state = AttentionState(builder, self.limits, max_blocks=1)  # states have no table
            self.groups[key] = BufferGroup(name, state, slots)
        return self.groups[key]


class CapturedStep(PagedStep):
    """A step over the buffers."""

    def __init__(self, buffers: DecodeBuffers, size: int) -> None:
        super().__init__(buffers.paged, {}, None, buffers.positions[:size])
        self._buffers, self._size = buffers, size
        self._found: dict[int, tuple[BufferGroup, list[Any]]] = {}

    @property
    def groups(self) -> list[BufferGroup]:
        """Those that the layers of the model asked for."""
        return [group for group, _ in self._found.values()]

    def metadata_for(self, layer: Attention, group: str | None = None) -> Any:
        """See `PagedStep.metadata_for`."""
        return self._metadata_of(self._buffers.of_layer(layer, group))[0]

    def state_metadata(self, one: MixerLayer) -> StateMetadata:
        """See `PagedStep.state_metadata`."""
        number = 0 if one.place is None else one.place.number
        found: StateMetadata = self._metadata_of(self._buffers.of_states(one))[number]
        return found

    def _metadata_of(self, group: BufferGroup) -> list[Any]:
        key = id(group.state)
        if key not in self._found:
            self._found[key] = (group, group.metadata(self._size))
        return self._found[key][1]
