"""The state layers of a model's mixers, and their slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.hybrid import HybridKVCache, StateGroup
from attnlib.cache.states import StateCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import layer_name
from attnlib.layer.state import StateLayer
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.states import StateMetadata
from attnlib.spec import StateSpec

if TYPE_CHECKING:
    from attnlib.integrations.transformers.state_calls import MixerCall

__all__ = ["MixerLayer", "MixerLayers", "Place"]

_LAYER_TENSORS = ("conv_weight", "conv_bias", "skip", "log_decay")


class Place(NamedTuple):
    """Where the slots of a layer are in a pool: its group of states, and its number there."""

    group: str
    number: int


@dataclass(eq=False)
class MixerLayer:
    """A state layer of a mixer and where it runs; its slots, None before the pool exists; and their
    place in a pool, None for slots of its own."""

    layer: StateLayer
    device: torch.device
    cache: StateCache | None = None
    place: Place | None = None


class MixerLayers:
    """The state layers of a model. They are made in the first call of a mixer, with slots of their
    own or, for a pool, in the forward that finds the layers of the model.

    Args:
        num_slots: requests whose states are held at once, without a pool.
        max_rollback: tokens of the last step that the next one may take back (T10).
        backend: as in `PagedModel`.
        in_pool: the slots are blocks of a pool.

    Attributes:
        by_part: (mixer, "convolution", "recurrence" or "step") -> its layer.
    """

    def __init__(
        self,
        num_slots: int,
        max_rollback: int,
        backend: str | type[AttentionBackend] | None,
        in_pool: bool,
    ) -> None:
        self.num_slots, self.max_rollback, self.backend = num_slots, max_rollback, backend
        self.in_pool = in_pool
        self.by_part: dict[tuple[nn.Module, str], MixerLayer] = {}
        self._builders: dict[type[AttentionBackend], AttentionMetadataBuilder[Any]] = {}

    @property
    def cache_bytes(self) -> int:
        """Total size of the slots in bytes; 0 for those in a pool."""
        own = (one.cache for one in self.by_part.values() if one.place is None)
        return sum(cache.memory.numel() for cache in own if cache is not None)

    def builder_of(self, one: MixerLayer) -> AttentionMetadataBuilder[Any]:
        """The metadata builder that all layers of one backend share."""
        backend = one.layer.backend
        if backend not in self._builders:
            self._builders[backend] = backend.make_builder(one.layer.spec, one.device)
        return self._builders[backend]

    def layer_of(
        self,
        call: MixerCall,
        part: str,
        fields: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        scale: float | None = None,
    ) -> tuple[StateLayer, StateCache, StateMetadata] | None:
        """What a part of a mixer runs with: its layer, the slots and the batch; None in a step that
        computes nothing.

        Args:
            call: of the mixer.
            part: "convolution", "recurrence", or "step" for both.
            fields: of its spec.
            tensors: those of the layer by name; any other one shows the device.
            scale: of the layer.

        Raises:
            UnsupportedConfigError: the mixer did not call this part when the pool was made.
        """
        mixer = call.mixer
        if (mixer, part) not in self.by_part:
            device = next(iter(tensors.values())).device
            layer = StateLayer(
                StateSpec(**fields, max_rollback=self.max_rollback),
                backend=self.backend,
                scale=scale,
                prefix=f"{layer_name(mixer)} ({part})",
                device=device,
                **{name: x for name, x in tensors.items() if name in _LAYER_TENSORS},
            )
            found = self.by_part[mixer, part] = MixerLayer(layer, device)
            if not self.in_pool:
                found.cache = StateCache.allocate(layer.spec, self.num_slots, device=device)
        one = self.by_part[mixer, part]
        if call.step.is_discovery:
            return None
        if one.cache is None:
            raise UnsupportedConfigError(
                f"{layer_name(mixer)} calls a {part} that it did not call for one token, when the "
                "pool was made: use hybrid=False"
            )
        return one.layer, one.cache, call.step.state_metadata(one)

    def groups(self) -> dict[str, StateGroup]:
        """The groups of a pool for the layers that were found: one for each spec."""
        counts = Counter(one.layer.spec for one in self.by_part.values())
        return {
            f"states #{number}" if number > 1 else "states": StateGroup(spec, count)
            for number, (spec, count) in enumerate(counts.items(), 1)
        }

    def use_pool(self, pool: HybridKVCache) -> None:
        """Give each layer the slots of its group."""
        names = {cache.spec: name for name, cache in pool.states.items()}
        places: Counter[str] = Counter()
        for one in self.by_part.values():
            name = names[one.layer.spec]
            one.cache, one.place = pool.states[name], Place(name, places[name])
            places[name] += 1
