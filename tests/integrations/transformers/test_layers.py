"""The attnlib layers of the modules of a model."""

from __future__ import annotations

import pytest
import torch

from attnlib.integrations.transformers.attention import attnlib_attention
from tests.integrations.transformers.module_calls import Module, states


def test_the_backend_can_change_between_calls() -> None:
    """`use_backend` and ATTNLIB_BACKEND apply in every call; the layer has the module's name."""
    pytest.importorskip("triton")
    import attnlib
    from attnlib.integrations.transformers import layers

    module = Module()
    for name in ("torch", "triton", "torch"):
        with attnlib.use_backend(name):
            attnlib_attention(module, *states())
        (cached,) = layers._layers[module].values()
        assert (cached.layer.backend.get_name(), cached.layer.prefix) == (name, "Module.7")


def test_rewritten_sinks_are_read_again() -> None:
    """Loading other sinks into the same tensor takes effect."""
    module, sinks = Module(), torch.tensor([0.0, 0.0])
    before, _ = attnlib_attention(module, *states(), s_aux=sinks)
    sinks.copy_(torch.tensor([5.0, 5.0]))
    after, _ = attnlib_attention(module, *states(), s_aux=sinks)
    assert float((before - after).abs().max()) > 0.1
