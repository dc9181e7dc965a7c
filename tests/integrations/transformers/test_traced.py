"""Models under torch.compile: one graph, with the values of eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch._dynamo.utils import counters

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.traced import REASONS
from tests.integrations.tiny_models import (
    DECODERS,
    ENCODERS,
    decoder,
    generated,
    padded,
    prompts,
    randomized,
    run,
    t5,
)

VERSION = tuple(map(int, hf.__version__.split(".")[:2]))
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
"""The keyword of a model's cache, which transformers has renamed."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs_and_breaks() -> tuple[int, int]:
    """Graphs that torch.compile has made, and breaks between them."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def llama_of_12_layers() -> Any:
    return randomized(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=12,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                pad_token_id=0,
                eos_token_id=None,
                tie_word_embeddings=False,
            )
        )
    )


def compile_everywhere(backend: str = "eager") -> hf.CompileConfig:
    """What makes `generate` compile on a CPU, too."""
    config = hf.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def compiled_tokens(model: Any, batch: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
    """Greedy tokens over a static cache, by one compiled forward."""
    return generated(
        model,
        "attnlib",
        batch,
        tokens,
        cache_implementation="static",
        compile_config=compile_everywhere(),
    )


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_decoder_is_one_graph(name: str) -> None:
    """A padded prefill, and a decode over a `DynamicCache`, by one function with fullgraph=True."""
    model, batch = decoder(name), padded(prompts(9, 5), "left")
    real = batch["attention_mask"].bool()
    step = {
        "input_ids": torch.tensor([[5], [6]]),
        "attention_mask": torch.cat([batch["attention_mask"], torch.ones(2, 1).long()], dim=1),
    }
    found = {}
    for implementation in ("eager", "attnlib"):
        model.set_attn_implementation(implementation)
        forward = model.forward
        if implementation == "attnlib":
            forward = torch.compile(model.forward, backend="eager", fullgraph=True)
        prefill = forward(**batch, use_cache=True)
        decode = forward(**step, **{CACHE: prefill.past_key_values}, use_cache=True)
        found[implementation] = prefill.logits[real], decode.logits
    for ours, eager in zip(found["attnlib"], found["eager"], strict=True):
        assert float((ours - eager).abs().max()) < 2e-5
    graphs, breaks = graphs_and_breaks()
    assert (graphs, breaks) == (2, 0)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_prompts_without_padding(name: str) -> None:
    """transformers leaves the mask of such a step out for sdpa; to models that support eager
    attention only, no mask means that every query sees every key."""
    model, ids = decoder(name), torch.tensor(prompts(9, 9))
    model.set_attn_implementation("eager")
    wanted = model(ids, use_cache=True).logits
    model.set_attn_implementation("attnlib")
    found = torch.compile(model.forward, backend="eager", fullgraph=True)(ids, use_cache=True)
    assert float((found.logits - wanted).abs().max()) < 2e-5


def test_generate_over_a_static_cache_compiles_once() -> None:
    """12 layers are one graph: more layers than torch.compile recompiles a function for."""
    model, batch = llama_of_12_layers(), padded(prompts(9, 5), "left")
    expected = generated(model, "eager", batch, 10)
    assert torch.equal(compiled_tokens(model, batch, 10), expected)
    assert graphs_and_breaks() == (1, 0)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "gemma2"])
def test_static_caches_with_windows(name: str) -> None:
    """As for sdpa, one graph before the window is full, and one after."""
    model, batch = decoder(name), padded(prompts(4, 3), "left")
    expected = generated(model, "eager", batch, 8)
    assert torch.equal(compiled_tokens(model, batch, 8), expected)
    graphs, breaks = graphs_and_breaks()
    assert graphs <= 2 and not breaks


@torch.no_grad()
def test_a_compiled_forward_takes_the_mask_of_a_static_prefill() -> None:
    """`generate` makes the mask of a static cache outside of the compiled function."""
    model, batch = decoder("llama"), padded(prompts(9, 5), "left")
    expected = generated(model, "eager", batch, 6)
    model.set_attn_implementation("attnlib")
    model.forward = torch.compile(model.forward, backend="eager")
    found = model.generate(
        **batch, max_new_tokens=6, do_sample=False, cache_implementation="static"
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_an_encoder_is_one_graph(side: str) -> None:
    model = randomized(ENCODERS["bert"]())
    batch = padded(prompts(9, 5), side)
    real = batch["attention_mask"].bool()
    expected = run(model, "eager", lambda m: m(**batch).last_hidden_state)[real]
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    found = run(model, "attnlib", lambda m: compiled(**batch).last_hidden_state)[real]
    assert float((found - expected).abs().max()) < 2e-5


@torch.no_grad()
def test_position_biases_are_part_of_the_graph() -> None:
    model, batch = t5(), dict[str, Any](padded(prompts(9, 5), "right"))
    tokens = torch.tensor([[5, 3], [6, 2]])
    batch |= {"decoder_input_ids": tokens, "use_cache": False}
    expected = run(model, "eager", lambda m: m(**batch).logits)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    found = run(model, "attnlib", lambda m: compiled(**batch).logits)
    assert float((found - expected).abs().max()) < 2e-4


@torch.no_grad()
def test_autocast_is_traced() -> None:
    model, batch = decoder("llama"), padded(prompts(9, 5), "left")
    model.set_attn_implementation("attnlib")
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(**batch).logits, compiled(**batch).logits
    real = batch["attention_mask"].bool()
    assert float((found - expected)[real].abs().max()) < 2e-2


def test_gradients_are_refused_when_they_are_computed() -> None:
    """A compiled forward with gradients enabled works; its backward is refused."""
    model, batch = decoder("llama"), padded(prompts(9, 9), "left")
    expected = run(model, "eager", lambda m: m(**batch).logits)
    model.set_attn_implementation("attnlib")
    found = torch.compile(model.forward, backend="aot_eager", fullgraph=True)(**batch).logits
    assert float((found - expected).abs().max()) < 2e-5
    with pytest.raises(UnsupportedConfigError, match="computes inference only"):
        found.sum().backward()


@torch.no_grad()
def test_what_is_not_traced_is_refused_with_the_reason() -> None:
    """With fullgraph=True; without it the call runs outside of the graph."""
    model, batch = decoder("llama"), padded(prompts(9, 9), "left")
    # It also installs hooks of transformers, which cannot be traced.
    expected = run(model, "eager", lambda m: m(**batch, output_attentions=True).attentions)
    whole = torch.compile(model.forward, backend="eager", fullgraph=True)
    model.set_attn_implementation("attnlib")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASONS["output_attentions"]):
        whole(**batch, output_attentions=True)
    torch._dynamo.reset()
    parts = torch.compile(model.forward, backend="eager")
    found = parts(**batch, output_attentions=True).attentions
    assert len(found) == len(expected)
    for ours, eager in zip(found, expected, strict=True):
        assert float((ours - eager).abs().max()) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@torch.no_grad()
def test_inductor(name: str) -> None:
    """The default compiler, which checks that results have the declared strides."""
    model, batch = decoder(name), padded(prompts(9, 5), "left")
    real = batch["attention_mask"].bool()
    expected = run(model, "eager", lambda m: m(**batch, use_cache=False).logits)[real]
    compiled = torch.compile(model.forward, fullgraph=True)
    found = run(model, "attnlib", lambda m: compiled(**batch, use_cache=False).logits)[real]
    assert float((found - expected).abs().max()) < 2e-5
