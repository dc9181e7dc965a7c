"""State layers on the `triton` backend beside the torch backend."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS


@pytest.mark.parametrize("name", ["gated delta", "short convolution"])
def test_layers_equal_those_of_torch(device: torch.device, name: str) -> None:
    """Two steps with drafts, lengths and slots on the device only."""
    spec, results = KINDS[name].replace(max_rollback=2), []
    own, tokens = draw_layer(spec), draw_tokens(spec, 12, 3)
    inputs = {key: x.to(device) for key, x in tokens.tensors().items()}
    weights = {
        key: None if x is None else x.to(device) for key, x in vars(own).items() if key != "scale"
    }
    for backend in ("triton", "torch"):
        with attnlib.use_backend(backend):
            layer = attnlib.StateLayer(spec, **weights, device=device)
        cache = attnlib.StateCache.allocate(layer.spec, 4, device=device)
        builder, outs = layer.backend.make_builder(layer.spec, device), []
        for first, end in ((0, 9), (7, 9), (8, 12)):
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [end - first, 0], [end, 0], device=device, state_slots=[2, -1]
            )
            metadata = builder.build(0, common)
            rows = {key: x[first:end] for key, x in inputs.items()}
            if spec.has_convolution:
                outs.append(layer.convolve(rows["x"], cache, metadata).float())
            if spec.has_recurrence:
                names = ("query", "key", "value", "log_decay", "beta")
                outs.append(layer(*map(rows.get, names), cache, metadata).float().flatten(1))
        results.append(outs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
