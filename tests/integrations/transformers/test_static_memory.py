"""What a CUDA graph of compiled decodes reads stays at its address between `generate` calls.

A graph is recorded again where a tensor that transformers declares static has another address, and
compiled again where a guard fails. Both are counted here on a CPU, by a compiler backend that sees
the inputs of the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
import transformers as hf

from attnlib.integrations.transformers import opaque, static_memory
from attnlib.integrations.transformers.static_memory import keep_static_memory
from tests.integrations.tiny_models import bart, decoder, generated, padded, prompts
from tests.integrations.transformers.test_traced import compile_everywhere, graphs_and_breaks

CPU = torch.device("cpu")
TOKENS = 7
BATCH = padded(prompts(9, 5), "left")


class GraphInputs:
    """What a compiler backend, which runs graphs as they are, sees of their inputs.

    Attributes:
        runs: of each call of a graph, the addresses of its static inputs: parameters, buffers and
            what transformers marks.
        copied: of each graph, how many other inputs a CUDA graph copies in every call.
        memory: allocations between the runs, so that nothing is at an old address by chance.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, ...]] = []
        self.copied: list[int] = []
        self.memory: list[torch.Tensor] = []

    def backend(self) -> Callable[..., Any]:
        """A function, because transformers copies what it is given."""
        return lambda graph, inputs: self._compile(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        static = [
            isinstance(given, torch.nn.Parameter)
            or "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
            for node, given in zip(nodes, inputs, strict=True)
        ]
        self.copied.append(
            sum(isinstance(x, torch.Tensor) for x, s in zip(inputs, static, strict=True) if not s)
        )

        def run(*given: Any) -> Any:
            self.runs.append(
                tuple(x.data_ptr() for x, is_static in zip(given, static, strict=True) if is_static)
            )
            return graph(*given)

        return run


def is_recorded(device: torch.device) -> bool:
    """What recording a graph does to the memory of static caches; the call itself is an ordinary
    one, because nothing records on a CPU."""
    keep_static_memory(device)
    return False


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(opaque, "_is_recorded", is_recorded)
    static_memory.forget_static_memory()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled_generations(model: Any, implementation: str, calls: int = 3) -> GraphInputs:
    """Greedy `generate` calls over static caches, whose tokens are those of eager attention."""
    expected = generated(model, "eager", BATCH, TOKENS)
    inputs = GraphInputs()
    backend: Any = inputs.backend()
    for _ in range(calls):
        found = generated(
            model,
            implementation,
            BATCH,
            TOKENS,
            cache_implementation="static",
            compile_config=compile_everywhere(backend),
        )
        assert torch.equal(found, expected)
        sizes = [(2, heads, tokens, 8) for heads in (2, 4) for tokens in (5, 9, 15, 16)]
        inputs.memory += [torch.empty(size) for size in sizes for _ in range(8)]
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_static_inputs_stay_where_they_are(name: str) -> None:
    """Those of windows, and of tensors that count tokens, too. No graph is made after the first
    call, and none has more inputs to copy than with sdpa or eager attention."""
    model = decoder(name)
    inputs = compiled_generations(model, "attnlib")
    graphs, breaks = graphs_and_breaks()
    assert graphs == len(inputs.copied) <= 2 and not breaks
    by_graph: dict[int, set[tuple[int, ...]]] = {}
    for addresses in inputs.runs:
        by_graph.setdefault(len(addresses), set()).add(addresses)
    assert len(inputs.runs) == 3 * (TOKENS - 1)
    assert all(len(places) == 1 for places in by_graph.values())
    torch._dynamo.reset()
    other = compiled_generations(model, "sdpa" if model._supports_sdpa else "eager", calls=1)
    assert max(inputs.copied) <= max(other.copied)
    assert {len(addresses) for addresses in other.runs} == by_graph.keys()


def new_cache(model: Any, batch: int = 2, tokens: int = 12) -> Any:
    """A static cache after a forward of attnlib."""
    model.set_attn_implementation("attnlib")
    cache = hf.StaticCache(config=model.config, max_cache_len=tokens)
    with torch.no_grad():
        model(torch.full((batch, 3), 5), past_key_values=cache, use_cache=True)
    return cache


def addresses(cache: Any) -> list[int]:
    tensors = (x for layer in cache.layers for x in (layer.keys, layer.values))
    return [tensor.data_ptr() for tensor in tensors]


def kept_places(model: Any) -> list[int]:
    """Keep the memory of a cache that ends; returns its addresses."""
    cache = new_cache(model)
    keep_static_memory(CPU)
    return addresses(cache)


def test_a_recording_keeps_the_caches_in_use() -> None:
    """Those of models that run with attnlib, and nothing before a graph is recorded."""
    model, other = decoder("llama"), decoder("llama")
    caches = [new_cache(model), new_cache(other)]
    other.set_attn_implementation("eager")
    caches.append(hf.StaticCache(config=other.config, max_cache_len=12))
    assert not len(static_memory._kept)
    with opaque._scope(CPU):
        pass
    assert model.config in static_memory._kept and other.config in static_memory._kept
    assert caches[-1].layers[0] not in static_memory._owners
    assert len(static_memory._kept[model.config]) == 3 * len(caches[0].layers)


def test_a_new_cache_is_empty_and_takes_the_kept_memory() -> None:
    model = decoder("llama")
    places = kept_places(model)
    cache = new_cache(model)
    assert addresses(cache) == places
    assert not cache.layers[0].keys[:, :, 3:].any() and cache.layers[0].keys[:, :, :3].all()
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("held", ["cache", "keys", "view"])
def test_memory_in_use_is_not_taken(held: str) -> None:
    """A user may keep a cache, a tensor of it, or a view: it never changes."""
    model = decoder("llama")
    cache = new_cache(model)
    keep_static_memory(CPU)
    keys = cache.layers[0].keys
    kept = {"cache": cache, "keys": keys, "view": keys[:, 1:]}[held]
    before, place = keys.clone(), keys.data_ptr()
    del cache, keys
    assert addresses(new_cache(model))[0] != place
    now = {"cache": lambda: kept.layers[0].keys, "keys": lambda: kept, "view": lambda: kept}[held]()
    assert torch.equal(now, before[:, 1:] if held == "view" else before)


def test_caches_of_other_sizes_release_the_memory() -> None:
    model = decoder("llama")
    kept_places(model)
    new_cache(model, batch=3)
    assert not static_memory._kept[model.config]


def test_inference_mode_has_memory_of_its_own() -> None:
    """Its tensors cannot be written outside of it."""
    model = decoder("llama")
    with torch.inference_mode():
        kept_places(model)
    new_cache(model)


def test_the_memory_ends_with_the_model() -> None:
    """And with the registration."""
    model = decoder("llama")
    kept_places(model)
    tensor = ref(static_memory._kept[model.config][0, ("keys",)].tensor)
    assert tensor() is not None
    del model
    gc.collect()
    assert tensor() is None


def test_states_of_layers_without_keys() -> None:
    """A hybrid cache: states of convolutions and recurrences are static, too."""
    config = hf.Qwen3NextConfig(num_hidden_layers=2)
    config._attn_implementation = "attnlib"

    def states() -> tuple[Any, list[torch.Tensor]]:
        cache = hf.StaticCache(config=config, max_cache_len=8)
        layer = cache.layers[0]
        layer.update_conv_state(torch.ones(2, 6, 4))
        layer.update_recurrent_state(torch.ones(2, 3, 4, 4))
        return cache, [layer.conv_states[0], layer.recurrent_states[0]]

    cache, tensors = states()
    places = [tensor.data_ptr() for tensor in tensors]
    keep_static_memory(CPU)
    del cache, tensors
    cache, tensors = states()
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_caches_whose_model_is_unknown() -> None:
    """Encoder-decoders have copies of their config, which end before the first token."""
    model, batch = bart(), padded(prompts(7, 4), "right")
    expected = generated(model, "eager", batch, TOKENS)
    for _ in range(2):
        found = generated(model, "attnlib", batch, TOKENS, cache_implementation="static")
        keep_static_memory(CPU)
        assert torch.equal(found, expected)
