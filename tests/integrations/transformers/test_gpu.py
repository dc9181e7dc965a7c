"""Plain and continuous generation on a GPU, also with CUDA graphs, against eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integrations.tiny_models import (
    DECODERS,
    bart,
    decoder,
    generated,
    padded,
    prompts,
    randomized,
    run,
)
from tests.integrations.transformers.test_autocast import (
    LOW,
    errors_of_a_forward,
    generated_under_autocast,
)
from tests.integrations.transformers.test_continuous import batch_tokens, eager_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation reads from the device, which a capture forbids."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")


def on_gpu(rows: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in padded(rows, side).items()}


def eager_tokens_on_gpu(model: Any, inputs: list[list[int]], tokens: int) -> list[list[int]]:
    return [
        generated(model, "eager", on_gpu([ids]), tokens)[0, len(ids) :].tolist() for ids in inputs
    ]


def float32_model(name: str) -> Any:
    torch.backends.cuda.matmul.allow_tf32 = False
    return decoder(name).cuda()


def bfloat16_model() -> Any:
    """A model with a head size of 64."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = randomized(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                max_position_embeddings=512,
                pad_token_id=0,
                eos_token_id=None,
                **sizes,
            )
        )
    )
    for parameter in model.parameters():
        parameter.data *= 0.3 if parameter.dim() > 1 else 1.0
    return model.to(torch.bfloat16).cuda()


@pytest.mark.parametrize("name", DECODERS)
def test_float32_tokens_equal_eager(name: str, backend: str) -> None:
    """Padded batches, left and right."""
    model = float32_model(name)
    for side, lengths in (("left", (9, 5, 2)), ("right", (9, 7, 5))):
        batch = on_gpu(prompts(*lengths), side)
        assert torch.equal(
            generated(model, "attnlib", batch, 12), generated(model, "eager", batch, 12)
        ), side


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", DECODERS)
def test_autocast(name: str, low: torch.dtype, backend: str) -> None:
    eager, ours = errors_of_a_forward(float32_model(name), low, on_gpu(prompts(9, 5)))
    assert ours <= 2 * eager, (ours, eager)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_under_autocast(cache: str, low: torch.dtype, backend: str) -> None:
    tokens = generated_under_autocast(float32_model("gemma3"), low, on_gpu(prompts(9, 5)), cache)
    assert tokens.shape[1] == 14


@pytest.mark.parametrize("name", DECODERS)
def test_assisted_tokens_equal_eager(name: str, backend: str) -> None:
    """Several queries over a cache, which is cropped where drafts are rejected."""
    model, batch = float32_model(name), on_gpu([prompts(6)[0] * 3])
    assisted = {"prompt_lookup_num_tokens": 3}
    expected = generated(model, "eager", batch, 16)
    assert torch.equal(generated(model, "attnlib", batch, 16, **assisted), expected)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_continuous_batching_float32(name: str, graphs: bool, backend: str) -> None:
    """With and without CUDA graphs; full attention uses the decode path with block tables."""
    if graphs and backend == "torch":
        pytest.skip("the torch backend needs lengths on the host, which a graph cannot give")
    model, inputs = float32_model(name), prompts(5, 9, 33, 18)
    if graphs and name == "gpt_oss":
        # grouped_mm of the default experts copies offsets from the CPU in float32, which no graph
        # can capture.
        model.set_experts_implementation("batched_mm")
    settings = {"use_cuda_graph": graphs, "max_batch_tokens": 64}
    tokens = batch_tokens(model, inputs, 12, **settings)
    assert tokens == eager_tokens_on_gpu(model, inputs, 12)


def test_continuous_batching_by_default(backend: str) -> None:
    """By default graphs are enabled exactly if the selected backend can be captured."""
    model, inputs = float32_model("llama"), prompts(5, 9, 33)
    assert batch_tokens(model, inputs, 12) == eager_tokens_on_gpu(model, inputs, 12)


def delay_inputs(patch: pytest.MonkeyPatch) -> None:
    """Let the stream that fills the inputs of batches be late, and the one that reads them later,
    as on a GPU that computes for other programs, too."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    fill, compute = ContinuousBatchingIOs._reset_static_tensors, ModelRunner.compute_batch
    late = [0]

    def fill_late(self: Any, full_reset: bool = False) -> None:
        if full_reset and self.device.type == "cuda":
            torch.cuda._sleep(100_000_000)
            late[0] = 2
        fill(self, full_reset)

    def compute_later(self: Any, *args: Any, **kwargs: Any) -> None:
        if late[0]:
            late[0] -= 1
            with torch.cuda.stream(self.inputs_and_outputs.compute_stream):
                torch.cuda._sleep(500_000_000)
        compute(self, *args, **kwargs)

    patch.setattr(ContinuousBatchingIOs, "_reset_static_tensors", fill_late)
    patch.setattr(ModelRunner, "compute_batch", compute_later)


def test_continuous_batching_waits_for_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers alone computes with inputs that are filled after they are copied."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    model, inputs = float32_model("llama"), prompts(5, 9, 33)
    expected = eager_tokens_on_gpu(model, inputs, 12)
    with monkeypatch.context() as patch:
        delay_inputs(patch)
        assert batch_tokens(model, inputs, 12, use_async_batching=True) == expected


def test_bfloat16_logits(backend: str) -> None:
    """The bfloat16 error of attnlib is at most twice that of eager, relative to float32 eager."""
    model, batch = bfloat16_model(), on_gpu(prompts(200, 130, 7))
    real = batch["attention_mask"].bool()
    ours, eagers = (
        run(model, name, lambda m: m(**batch).logits.float())[real] for name in ("attnlib", "eager")
    )
    exact = run(model.float(), "eager", lambda m: m(**batch).logits)[real]
    error, budget = (ours - exact).abs().max(), (eagers - exact).abs().max()
    assert error <= 2 * budget + 1e-3, (error, budget)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_a_compiled_static_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` compiles the forward for a static cache with `mode="reduce-overhead"`: without
    breaks, in CUDA graphs, and with other masks at each replay. Two prompts, so that graphs are
    recorded and replayed."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    model = float32_model(name)
    if name == "gpt_oss":
        # PyTorch's grouped product of float32 experts reads their sizes on the host.
        model.set_experts_implementation("batched_mm")
    kwargs, skips = {"cache_implementation": "static"}, {}
    batches = [on_gpu(prompts(*lengths)) for lengths in ((9, 5), (6, 8))]
    for implementation in ("eager", "attnlib"):
        torch._dynamo.reset()
        counters.clear()
        for batch in batches:
            expected = generated(model, "eager", batch, 10)
            assert torch.equal(generated(model, implementation, batch, 10, **kwargs), expected)
        skips[implementation] = counters["inductor"]["cudagraph_skips"]
    assert not counters["graph_break"]
    assert skips["attnlib"] <= skips["eager"]


@torch.no_grad()
def test_a_whole_model_in_cuda_graphs() -> None:
    """Prefills with and without padding, recorded by Inductor: nothing is read on the host."""
    model = float32_model("mistral")
    torch._dynamo.reset()
    batches = [on_gpu(prompts(9, length)) for length in (5, 7, 3, 2)]
    expected = [run(model, "eager", lambda m, b=b: m(**b, use_cache=False).logits) for b in batches]
    model.set_attn_implementation("attnlib")
    compiled = torch.compile(model.forward, fullgraph=True, mode="reduce-overhead")
    for batch, logits in zip(batches, expected, strict=True):
        real = batch["attention_mask"].bool()
        found = compiled(**batch, use_cache=False).logits
        assert float((found - logits)[real].abs().max()) < 1e-4
        plain = compiled(input_ids=batch["input_ids"], use_cache=False).logits
        assert bool(plain.isfinite().all())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bart"])
@torch.no_grad()
def test_decode_steps_do_not_synchronize(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first step, which compiles kernels, no step of a padded batch waits for the GPU."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    model = bart().cuda() if name == "bart" else float32_model(name)
    model.set_attn_implementation("attnlib")
    if name == "gpt_oss":
        # PyTorch's grouped product of float32 experts, the default, reads their sizes on the host.
        model.set_experts_implementation("batched_mm")
    batch = on_gpu(prompts(9, 5, 2))
    tokens = torch.tensor([[5], [6], [7]], device="cuda")
    decoder_only = not model.config.is_encoder_decoder
    out = model(**batch, **({} if decoder_only else {"decoder_input_ids": tokens}), use_cache=True)
    mask, encoded = batch["attention_mask"], getattr(out, "encoder_last_hidden_state", None)
    for step in range(4):
        if decoder_only:
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            inputs = {"input_ids": tokens}
        else:
            inputs = {"decoder_input_ids": tokens, "encoder_outputs": (encoded,)}
        inputs |= {"attention_mask": mask, "past_key_values": out.past_key_values}
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            out = model(**inputs, use_cache=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(out.logits.isfinite().all())


def test_the_cpu_helper_agrees() -> None:
    """The reference on the GPU equals the reference of the CPU tests."""
    inputs = prompts(5, 9)
    assert eager_tokens_on_gpu(float32_model("llama"), inputs, 8) == eager_tokens(
        decoder("llama"), inputs, 8
    )
