"""Decodes of a `PagedModel` in CUDA graphs.

On a CPU, a replay calls the forward that would be captured, over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import blocks_of, serve
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers import decode_graphs, devices
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata
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

    def emulated(forward: Any, buffers: Any) -> Any:
        shape = forward().shape
        with torch.inference_mode(False):
            out = torch.zeros(shape)
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


class Steps:
    """Steps of requests with 16 blocks each, with graphs and without, by their lengths."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.models = [paged_model(make(), cuda_graphs=wanted) for wanted in (True, False)]
        self.texts = torch.tensor(prompts(*[40] * 4))

    def run(self, starts: list[int], ends: list[int], **changes: Any) -> list[torch.Tensor]:
        """The logits of both for tokens `starts` to `ends` of the requests."""
        device = next(self.models[0].model.parameters()).device
        spans = [range(*span) for span in zip(starts, ends, strict=True)]
        blocks = [list(range(16 * n, 16 * n + 16)) for n in range(len(ends))]
        batch = CommonAttentionMetadata.from_lengths(
            [len(span) for span in spans], ends, blocks, 4, device
        )
        batch = batch.replace(**changes)
        ids = torch.cat([self.texts[n, list(span)] for n, span in enumerate(spans)]).to(device)
        positions = torch.tensor([place for span in spans for place in span], device=device)
        found = []
        for paged in self.models:
            with paged.attached():
                found.append(paged.step(ids, positions, batch))
        return found

    def decode(self, lengths: list[int], **changes: Any) -> None:
        """Compare the logits of the next tokens."""
        graph, eager = self.run(lengths, [length + 1 for length in lengths], **changes)
        assert torch.allclose(graph, eager, atol=1e-4)


def phi3() -> Any:
    """Other frequencies from 17 tokens on, for all requests of a batch."""
    scaled = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
        "factor": 8.0,
    }
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        original_max_position_embeddings=16, rope_parameters=scaled, pad_token_id=0,
    )  # fmt: skip
    return randomized(transformers.Phi3ForCausalLM(config))


def test_padding_has_no_position(replays: list[int]) -> None:
    """That of a request which was in an earlier batch would choose the frequencies."""
    steps = Steps(phi3)
    steps.run([0] * 4, [4, 3, 5, 15])
    for done in range(4):
        steps.decode([4 + done, 3 + done, 5 + done, 15 + done])
    for done in range(4, 6):
        steps.decode([4 + done, 3 + done, 5 + done])
    assert replays == [4] * 5


def test_missing_parts_of_a_batch_are_refused(replays: list[int]) -> None:
    """Those of the batch before are not used."""
    steps = Steps(lambda: decoder("llama"))
    steps.run([0, 0], [5, 3])
    for done in range(3):
        steps.decode([5 + done, 3 + done])
    for name in ("block_table_tensor", "slot_mapping"):
        with pytest.raises(ContractError, match=name.removesuffix("_tensor")):
            steps.decode([8, 6], **{name: None})
    with pytest.raises(ContractError, match="position_ids is torch.float32"):
        paged = steps.models[0]
        batch = CommonAttentionMetadata.from_lengths([1], [6], [[1, 2]], 4, "cpu")
        paged.step(torch.tensor([3]), torch.tensor([5.5]), batch)
    with pytest.raises(UnsupportedConfigError, match="call step within"):
        paged.step(torch.tensor([3]), torch.tensor([5]), batch)
    steps.decode([8, 6])
    assert replays == [2] * 3


def test_masks_of_a_batch_run_without_a_graph(replays: list[int]) -> None:
    """A tensor that says which requests are causal is not compared."""
    steps = Steps(lambda: decoder("llama"))
    steps.run([0, 0], [5, 3])
    for done in range(3):
        steps.decode([5 + done, 3 + done], causal=torch.ones(2, dtype=torch.bool))
    assert not replays


def test_graphs_of_inference_mode_run_outside(replays: list[int]) -> None:
    """Their buffers can be written there."""
    steps = Steps(lambda: decoder("llama"))
    with torch.no_grad():
        steps.run([0, 0], [5, 3])
    with torch.inference_mode():
        steps.decode([5, 3])
        steps.decode([6, 4])
    steps.decode([7, 5])
    assert replays == [2, 2]


def test_graphs_need_limits() -> None:
    """They bound what is captured."""
    with pytest.raises(ContractError, match=r"needs limits=BatchLimits"):
        paged_model(decoder("llama"), limits=None)
