"""Decodes of a `PagedModel` in CUDA graphs.

On a CPU, a replay calls the forward that would be captured, over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import blocks_of, serve
from attnlib.errors import ContractError
from attnlib.integrations.transformers import decode_graphs, devices
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.workspace import BatchLimits
from tests.integrations.tiny_models import decoder, deepseek_v3, gemma3n, prompts, randomized
from tests.integrations.transformers.test_state_mixers import built, skip_in_older_releases
from tests.integrations.transformers.test_state_mixers import pytestmark as has_state_functions

LIMITS = BatchLimits(max_num_reqs=6, max_num_tokens=32, max_seq_len=64)
ON_GPU = torch.cuda.is_available()
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: decoder("llama"),
    "gpt_oss": lambda: decoder("gpt_oss"),  # windows, sinks, experts
    "latents": lambda: randomized(deepseek_v3()),
}
STATES = ("qwen3_next", "mamba2", "kimi_linear")


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all replays. On a CPU it makes them calls."""
    found: list[int] = []
    original: Any = decode_graphs.capture

    def emulated(forward: Any, device: Any, pool: Any) -> Any:
        out = forward().clone()
        return lambda: out.copy_(forward()), out

    def capture(*arguments: Any) -> Any:
        replay, out = (original if ON_GPU else emulated)(*arguments)

        def recorded() -> None:
            found.append(out.shape[0])
            replay()

        return recorded, out

    monkeypatch.setattr(decode_graphs, "capture", capture)
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)  # checked steps run without graphs
    return found


def paged_model(model: Any, hybrid: bool = False, **more: Any) -> PagedModel:
    """A model on the `triton` backend."""
    options = {"limits": LIMITS, "cuda_graphs": True, **more}
    model = model.to("cuda" if ON_GPU else "cpu")
    return PagedModel(
        model, num_blocks=96, block_size=4, backend="triton", hybrid=hybrid, **options
    )


def served(paged: PagedModel, lengths: tuple[int, ...], new: tuple[int, ...]) -> list[list[int]]:
    """The new tokens of prompts that end at different steps."""
    requests = [
        Request(n, prompt, count)
        for n, (prompt, count) in enumerate(zip(prompts(*lengths), new, strict=True))
    ]
    serve(paged, Scheduler(blocks_of(paged), 16, 6), requests)
    return [request.generated for request in requests]


@pytest.mark.parametrize("hybrid", [False, True], ids=["caches", "pool"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_graphs(name: str, hybrid: bool, replays: list[int]) -> None:
    """As requests end and their batch shrinks, within a size and to another."""
    sizes = ((7, 3, 12, 5, 9), (6, 9, 8, 4, 7))
    expected = served(paged_model(MODELS[name](), hybrid, cuda_graphs=False), *sizes)
    assert not replays
    paged = paged_model(MODELS[name](), hybrid)
    assert served(paged, *sizes) == expected
    assert paged.graphs is not None
    assert set(replays) == set(paged.graphs.captured) == {4, 6}
    count = len(replays)
    assert served(paged, *sizes) == expected, "over other blocks"
    assert len(replays) > count


@has_state_functions
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in STATES)]
)
def test_states_are_those_without_graphs(name: str, replays: list[int]) -> None:
    """Over a pool, each layer has slots of its own."""
    skip_in_older_releases(name)
    sizes = ((7, 3, 12), (6, 9, 8))
    expected = served(paged_model(built(name), hybrid=True, cuda_graphs=False), *sizes)
    paged = paged_model(built(name), hybrid=True)
    assert served(paged, *sizes) == expected
    assert set(replays) == {2, 4}


def test_what_a_graph_would_not_see_runs_without(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observers, checks of values, and layers that share keys."""
    sizes = ((5, 4), (6, 6))
    paged = paged_model(decoder("llama"))
    monkeypatch.setattr(decode_graphs, "OBSERVERS", [print])
    served(paged, *sizes)
    monkeypatch.setattr(decode_graphs, "OBSERVERS", [])
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    served(paged, *sizes)
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    served(paged_model(gemma3n()), *sizes)
    assert not replays
    served(paged, *sizes)
    assert replays


def test_a_capture_that_fails_is_reported_once(
    replays: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decodes of its size then run as without graphs."""
    expected = served(paged_model(decoder("llama"), cuda_graphs=False), (5, 4), (6, 6))

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("the model waits for the GPU")

    captures = decode_graphs.capture
    monkeypatch.setattr(decode_graphs, "capture", failing)
    paged = paged_model(decoder("llama"))
    with caplog.at_level(logging.WARNING, "attnlib"):
        assert served(paged, (5, 4), (6, 6)) == expected
    (message,) = (one.getMessage() for one in caplog.records)
    assert message.endswith(
        "of 2 requests run without a CUDA graph, because the capture failed: the model waits for "
        "the GPU"
    )
    monkeypatch.setattr(decode_graphs, "capture", captures)
    served(paged, (5, 4, 3), (6, 6, 6))
    assert set(replays) == {4}, "other sizes are captured"


def test_graphs_need_limits() -> None:
    """They bound what is captured."""
    with pytest.raises(ContractError, match=r"needs limits=BatchLimits"):
        paged_model(decoder("llama"), limits=None)
