"""`generate_batch`: continuous batching in the paged cache of transformers."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import (
    PagedAttentionCache,
    initialization,
    model_runner,
)

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import continuous, continuous_batch
from attnlib.layer import plans
from tests.integrations.tiny_models import (
    DECODERS,
    decoder,
    deepseek_v3,
    generated,
    nemotron,
    prompts,
    qwen2_moe,
    stablelm,
)
from tests.integrations.transformers_sweep import tiny

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
LENGTHS = {"torch": (5, 9, 33, 18), "triton": (3, 11)}
TOKENS = {"torch": 10, "triton": 3}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("psutil") is None and PAGE == "block_size",
        reason="without psutil this version of transformers finds no memory for the cache on a CPU",
    ),
]


def eager_tokens(model: Any, inputs: list[list[int]], tokens: int) -> list[list[int]]:
    """The tokens of plain `generate` with eager attention, prompt by prompt."""
    rows = [
        {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        for ids in inputs
    ]
    return [
        generated(model, "eager", row, tokens)[0, row["input_ids"].shape[1] :].tolist()
        for row in rows
    ]


def test_layers_of_a_step_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views of later layers begin later in the tensor of all layers."""
    made: list[Any] = []
    prepare = plans._prepare

    def counted(layer: Any, signature: Any, call: Any) -> Any:
        made.append(call.metadata)
        return prepare(layer, signature, call)

    monkeypatch.setattr(plans, "_prepare", counted)
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    model, inputs = decoder("llama"), prompts(5, 9)
    assert model.config.num_hidden_layers > 1
    assert batch_tokens(model, inputs, 6) == eager_tokens(model, inputs, 6)
    assert made and len(made) == len({id(metadata) for metadata in made})


def batch_tokens(
    model: Any,
    inputs: list[list[int]],
    tokens: int,
    implementation: str = "attnlib",
    **settings: Any,
) -> list[list[int]]:
    """The tokens of `generate_batch`. At most 24 tokens per step: long prompts come in chunks."""
    model.set_attn_implementation(implementation)
    config = ContinuousBatchingConfig(
        **{"num_blocks": 64, "max_batch_tokens": 24, PAGE: 8, **settings}
    )
    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=config,
        progress_bar=False,
    )
    assert len(outputs) == len(inputs), [
        getattr(output, "error", None) for output in outputs.values()
    ]
    return [
        outputs[key].generated_tokens
        for key in sorted(outputs, key=lambda key: int(key.split("_")[-1]))
    ]


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_equal_eager(name: str, backend: str) -> None:
    """Prompts shorter and longer than page and window, also chunked prefills mixed with decodes."""
    model, inputs = decoder(name), prompts(*LENGTHS[backend])
    tokens = batch_tokens(model, inputs, TOKENS[backend])
    assert model.config._attn_implementation == "attnlib"
    assert tokens == eager_tokens(model, inputs, TOKENS[backend])


def test_a_window_that_only_the_cache_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """M2: the module passes no window; in generate the mask contains it, here the cache does."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    model, inputs = qwen2_moe(), prompts(9, 20)
    assert batch_tokens(model, inputs, 6) == eager_tokens(model, inputs, 6)


def test_full_attention_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4, P7: keys are written by slot and read by block table; nothing is gathered."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    updated: Counter[int] = Counter()
    update = PagedAttentionCache.update

    def counting(self: PagedAttentionCache, *args: Any, **kwargs: Any) -> Any:
        updated[kwargs["layer_idx"]] += 1
        return update(self, *args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "update", counting)
    inputs = prompts(9, 20)
    for name, gathering in (("qwen3", set()), ("gemma3", {0})):
        updated.clear()
        model = decoder(name)
        assert batch_tokens(model, inputs, 5) == eager_tokens(model, inputs, 5)
        assert set(updated) == gathering, name


def test_a_shared_prefix_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that share pages of a prefix read them through their own block tables."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    prefix, model = prompts(17)[0], decoder("llama")
    inputs = [prefix + tail for tail in prompts(3, 6, 1, seed=5)]
    assert batch_tokens(model, inputs, 6) == eager_tokens(model, inputs, 6)


def test_metadata_is_built_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one type share the metadata of their step, and steps share none."""
    from attnlib.backends.torch.metadata import TorchMetadataBuilder

    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    builds, steps = [], []
    build, step_of = TorchMetadataBuilder.build, continuous._step_of

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        builds.append(self.spec)
        return build(self, *args, **kwargs)

    def watching(cache: Any, index: int, kwargs: dict[str, Any]) -> Any:
        step = step_of(cache, index, kwargs)
        steps.append((index, step))
        return step

    monkeypatch.setattr(TorchMetadataBuilder, "build", counting)
    monkeypatch.setattr(continuous, "_step_of", watching)
    batch_tokens(decoder("qwen3"), prompts(5, 30), 4)
    distinct = {id(step) for _, step in steps}
    assert len(builds) == len(distinct) == len(steps) // 2  # two layers, one build each step
    assert all(steps[i][1] is steps[i + 1][1] for i in range(0, len(steps), 2))


def test_a_repeated_step_is_a_new_step() -> None:
    """A capture repeats a step with the same tensors: nothing derived from them is reused."""

    class Cache:
        pass

    cache, starts = Cache(), torch.tensor([0, 1, 2], dtype=torch.int32)
    first = [continuous._step_of(cache, layer, {"cu_seq_lens_q": starts}) for layer in (0, 1)]
    again = [continuous._step_of(cache, layer, {"cu_seq_lens_q": starts}) for layer in (0, 1)]
    other = continuous._step_of(cache, 5, {"cu_seq_lens_q": starts.clone()})
    assert first[0] is first[1] and again[0] is again[1]
    assert first[0] is not again[0] and other is not again[0]


def test_padded_batches_of_graphs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M6, M7: batches padded as for CUDA graphs, with lengths that are unknown on the host."""
    init = model_runner.ModelRunner.__init__

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", padding)
    monkeypatch.setattr(model_runner.ModelRunner, "warmup", lambda self, model: None)
    if backend == "triton":
        monkeypatch.setattr(continuous_batch, "_needs_host_lengths", lambda layer, starts: False)
    inputs = prompts(*LENGTHS[backend])
    for name in ("llama", "gemma2"):
        model = decoder(name)
        settings = {"q_padding_interval_size": 8, "kv_padding_interval_size": 16}
        assert batch_tokens(model, inputs, TOKENS[backend], **settings) == eager_tokens(
            model, inputs, TOKENS[backend]
        ), name


def test_the_decode_path_passes_block_tables(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: decode-only batches have the table of transformers, from which slots are computed."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    attend, tables = continuous.placement, []

    def watching(storage: Any, lengths: Any, kwargs: dict[str, Any], num_tokens: int) -> Any:
        tables.append(kwargs.get("block_table"))
        return attend(storage, lengths, kwargs, num_tokens)

    monkeypatch.setattr(continuous, "placement", watching)
    model, inputs = decoder("llama"), prompts(*LENGTHS[backend])
    assert batch_tokens(model, inputs, TOKENS[backend], max_blocks_per_request=8) == eager_tokens(
        model, inputs, TOKENS[backend]
    )
    assert any(table is not None for table in tables) and any(table is None for table in tables)


def test_a_backend_that_needs_the_host_refuses_capture() -> None:
    """The message names the backend and the setting to change."""

    class Layer:
        from attnlib.backends.torch import TorchBackend as backend

    step = continuous.Step(torch.tensor([0, 1], dtype=torch.int32), capturing=True)
    with pytest.raises(
        UnsupportedConfigError, match=r"torch needs lengths on the host.*use_cuda_graph=False"
    ):
        continuous.common_of_step(Layer(), step, torch.tensor([1]), {"max_length_q": 1}, 1, 1)  # type: ignore[arg-type]


def test_a_wrong_page_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies the tests above: with a block table that is one page off, tokens differ."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    placement = continuous.placement

    def shifted(*args: Any) -> Any:
        table, slots, longest = placement(*args)
        return table.roll(1, dims=1), slots, longest

    model, inputs = decoder("llama"), prompts(20, 30)
    expected = eager_tokens(model, inputs, 6)
    monkeypatch.setattr(continuous, "placement", shifted)
    assert batch_tokens(model, inputs, 6) != expected


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_implementations_still_run(implementation: str) -> None:
    """Registration changes nothing for other implementations."""
    model, inputs = decoder("qwen3"), prompts(5, 12)
    assert batch_tokens(model, inputs, 4, implementation) == eager_tokens(model, inputs, 4)


def _errors(model: Any, inputs: list[list[int]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors of the requests of a `generate_batch` that must fail."""
    model.set_attn_implementation("attnlib")
    with caplog.at_level("CRITICAL"):
        outputs = model.generate_batch(
            inputs=inputs,
            generation_config=GenerationConfig(
                max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                **{"num_blocks": 64, "max_batch_tokens": 24, PAGE: 8}
            ),
            progress_bar=False,
        )
    assert all(not output.generated_tokens for output in outputs.values())
    return [str(output.error) for output in outputs.values()]


@pytest.mark.parametrize("model", [stablelm, nemotron])
def test_layers_that_lose_the_step_are_refused(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Their attention would be a plain call over the packed row."""
    errors = _errors(model(), prompts(5, 9), caplog)
    assert all("does not pass the arguments of a paged step on" in error for error in errors)


@pytest.mark.parametrize(
    ("name", "class_name"),
    [("gemma3n_text", "Gemma3nForCausalLM"), ("gemma4_text", "Gemma4ForCausalLM")],
)
def test_layers_that_share_keys(
    name: str, class_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 2 and 3 attend to the keys of layers 0 and 1 and do not update the cache."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    model, inputs = tiny.build(name, class_name), prompts(9, 30)
    assert model.config.num_kv_shared_layers == 2
    assert batch_tokens(model, inputs, 6) == eager_tokens(model, inputs, 6)


@pytest.mark.skipif(VERSION < (5, 24), reason="layers pass the cache on to their attention")
@pytest.mark.parametrize(
    ("name", "class_name"),
    [("diffllama", "DiffLlamaForCausalLM"), ("jetmoe", "JetMoeForCausalLM")],
)
def test_states_that_change_after_the_update_are_refused(
    name: str, class_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P4: the attention gets other keys or values than the model stores in the paged cache."""
    errors = _errors(tiny.build(name, class_name), prompts(5, 9), caplog)
    assert all("Attention.0 changes keys or values after it has" in error for error in errors)


def test_a_layer_that_does_not_attend_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Attention that calls no attention function would ignore the cache."""
    model = decoder("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    errors = _errors(model, prompts(5, 9), caplog)
    assert all("layers [1] did not attend over the paged cache" in error for error in errors)


def test_a_cache_with_other_head_sizes_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Multi-head latent attention: the message names the sizes and what to do."""
    errors = _errors(deepseek_v3(), prompts(5, 9), caplog)
    for error in errors:
        assert "DeepseekV3Attention.0: its keys and values have head sizes (24, 16)" in error
        assert "latent attention" in error and "use generate with" in error
