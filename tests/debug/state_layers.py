"""A state layer that serves requests, for tests of recorded calls."""

from __future__ import annotations

from typing import Any

import torch

import attnlib
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS

__all__ = ["GDN", "SPECS", "Served"]

GDN = KINDS["gated delta"]
SPECS: dict[str, StateSpec] = {
    **KINDS,
    "drafts in a tail": GDN.replace(max_rollback=3),
    "drafts in snapshots": GDN.replace(max_rollback=3, form="snapshots"),
    "constant decays in a tail": KINDS["lightning"].replace(form="tail"),
    "bfloat16": GDN.replace(dtype=torch.bfloat16),
}


class Served:
    """A layer on a backend over six slots.

    Args:
        spec: of the layer.
        backend: of the layer.
        prefix: its name.
    """

    def __init__(self, spec: StateSpec, backend: Any = "torch", prefix: str = "") -> None:
        tensors = {name: x for name, x in vars(draw_layer(spec)).items() if name != "scale"}
        self.layer = attnlib.StateLayer(
            spec, backend=backend, prefix=prefix, device="cpu", **tensors
        )
        self.spec = self.layer.spec
        self.cache = attnlib.StateCache.allocate(self.spec, 6, device="cpu")

    def step(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        slots: list[int],
        sources: list[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Both parts of the layer, over inputs with two rows past the batch, and strided values."""
        layer, spec = self.layer, self.spec
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, device="cpu", state_slots=slots, state_sources=sources
        )
        metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
        given, found = draw_tokens(spec, sum(query_lens) + 2, sum(seq_lens)), {}
        if given.x is not None:
            found["convolution"] = layer.convolve(given.x, self.cache, metadata)
        if given.query is not None and given.key is not None and given.value is not None:
            value = torch.cat([given.value, given.value], 2)[..., : spec.value_size]
            gates = given.log_decay, given.beta
            found["recurrence"] = layer(given.query, given.key, value, *gates, self.cache, metadata)
        return found

    def prefill(self) -> None:
        """Requests of 18, 5 and 1 tokens in slots 4, 0 and 2."""
        self.step([18, 5, 1], [18, 5, 1], [4, 0, 2])

    def mixed(self) -> dict[str, torch.Tensor]:
        """A decode in another slot than its source, a chunk, padding, an empty and a new request;
        with drafts, the first two take tokens back."""
        back = min(self.spec.max_rollback, 2)
        lengths = [1, 3, 1, 0, 4]
        totals = [19 - back, 8 - back, 9, 1, 4]
        return self.step(lengths, totals, [5, 0, -1, 2, 3], [4, 0, -1, 2, 3])
