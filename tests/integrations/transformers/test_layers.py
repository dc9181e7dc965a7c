"""The attnlib layers of the modules of a model."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.integrations.transformers import graph_backends, layers
from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.selection import get_attn_backend
from tests.integrations.transformers.module_calls import Module, states


def test_the_backend_can_change_between_calls() -> None:
    """`use_backend` and ATTNLIB_BACKEND apply in every call; the layer has the module's name."""
    pytest.importorskip("triton")
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


def test_a_graph_gets_a_backend_that_it_can_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto skips the others, such as FlashAttention; a required backend is not replaced."""
    pytest.importorskip("triton")

    def is_triton(backend: type[attnlib.AttentionBackend]) -> bool:
        return backend.get_name() == "triton"

    asked: list[str] = []

    def next_one(spec: attnlib.AttentionSpec, request: str, device: torch.device) -> type:
        asked.append(request)  # on a CPU, auto knows torch only
        return get_attn_backend(spec, "triton", device)

    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    monkeypatch.setattr(graph_backends, "get_attn_backend", next_one)
    for module in (graph_backends, layers):
        monkeypatch.setattr(module, "graphs_record", is_triton)
    call = layers.Call(Module(), *states(), 0.3, None, None, None, True)
    spec = call.spec(block_size=1)
    assert layers.layer_for(call, spec).backend.get_name() == "torch"
    with layers.transient():
        assert layers.layer_for(call, spec).backend.get_name() == "triton"
        with attnlib.use_backend("torch"):
            assert layers.layer_for(call, spec).backend.get_name() == "torch"
    assert asked == ["auto,-torch"]
