"""Decodes of models in CUDA graphs (`PagedModel(cuda_graphs=True)`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import blocks_of, serve
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.workspace import BatchLimits
from tests.gpu.devices import needs_gpu
from tests.integrations.tiny_models import decoder, deepseek_v3, gemma3n, prompts, randomized
from tests.integrations.transformers.test_state_mixers import built, skip_in_older_releases
from tests.integrations.transformers.test_state_mixers import pytestmark as has_state_functions

pytestmark = [pytest.mark.gpu, needs_gpu]

LIMITS = BatchLimits(max_num_reqs=6, max_num_tokens=32, max_seq_len=128)
SIZES = ((7, 3, 40, 5, 9), (12, 18, 20, 4, 7))
MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: decoder(name) for name in ("llama", "gemma2", "gpt_oss")},
    "latents": lambda: randomized(deepseek_v3()),
}
STATES = ("qwen3_next", "mamba2", "kimi_linear", "lfm2", "bamba")


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked steps run without graphs."""
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)


def tokens(model: Any, *, cuda_graphs: bool, hybrid: bool, runs: int = 2) -> Any:
    """The sizes with graphs, and the tokens of each run over one model."""
    paged = PagedModel(
        model, num_blocks=120, block_size=4, backend="triton", hybrid=hybrid, limits=LIMITS,
        cuda_graphs=cuda_graphs,
    )  # fmt: skip
    found = []
    for _ in range(runs):
        requests = [
            Request(n, prompt, count)
            for n, (prompt, count) in enumerate(zip(prompts(*SIZES[0]), SIZES[1], strict=True))
        ]
        serve(paged, Scheduler(blocks_of(paged), 16, 6), requests)
        found.append([request.generated for request in requests])
    return [] if paged.graphs is None else paged.graphs.captured, found


def compare(model: Any, hybrid: bool) -> None:
    """Whether graphs change no token."""
    model = model.cuda()
    _, expected = tokens(model, cuda_graphs=False, hybrid=hybrid, runs=1)
    captured, found = tokens(model, cuda_graphs=True, hybrid=hybrid)
    assert captured[-1] == 6 and len(captured) > 1
    assert found == expected * 2


@pytest.mark.parametrize("hybrid", [False, True], ids=["caches", "pool"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_graphs(name: str, hybrid: bool) -> None:
    """Batches shrink as requests end, within a graph and to smaller ones."""
    compare(MODELS[name](), hybrid)


@has_state_functions
@pytest.mark.parametrize("name", STATES)
def test_states_are_those_without_graphs(name: str) -> None:
    """Over a pool, where each layer has slots of its own."""
    skip_in_older_releases(name)
    compare(built(name), hybrid=True)


def test_a_model_that_waits_for_the_gpu_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    """The failed capture leaves nothing behind that a later step would meet."""
    model = decoder("llama").cuda()
    _, expected = tokens(model, cuda_graphs=False, hybrid=False, runs=1)
    model.model.norm.register_forward_hook(
        lambda module, given, output: output.sum().item() and None
    )
    with caplog.at_level(logging.WARNING, "attnlib"):
        captured, found = tokens(model, cuda_graphs=True, hybrid=False)
    assert captured == [] and found == expected * 2
    messages = [one.getMessage() for one in caplog.records]
    assert messages and all("the capture failed" in one for one in messages)


def test_layers_that_share_keys_run_without() -> None:
    """They compute only the tokens whose logits are needed."""
    captured, _ = tokens(gemma3n().cuda(), cuda_graphs=True, hybrid=False)
    assert captured == []


def test_weights_that_change_in_place_are_read() -> None:
    """A graph reads the memory of the weights."""
    model = decoder("llama").cuda()
    paged = PagedModel(
        model, num_blocks=120, block_size=4, backend="triton", limits=LIMITS, cuda_graphs=True
    )

    def run() -> list[list[int]]:
        requests = [Request(n, prompt, 12) for n, prompt in enumerate(prompts(5, 9))]
        serve(paged, Scheduler(blocks_of(paged), 16, 6), requests)
        return [request.generated for request in requests]

    run()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1.5)
    changed = run()
    assert paged.graphs is not None and paged.graphs.captured
    assert changed == tokens_of_prompts(model)


def tokens_of_prompts(model: Any) -> list[list[int]]:
    """The same without graphs."""
    paged = PagedModel(model, num_blocks=120, block_size=4, backend="triton")
    requests = [Request(n, prompt, 12) for n, prompt in enumerate(prompts(5, 9))]
    serve(paged, Scheduler(blocks_of(paged), 16, 6), requests)
    return [request.generated for request in requests]
