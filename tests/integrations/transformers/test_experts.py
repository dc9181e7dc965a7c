"""The experts of a model within `PagedModel.attached`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.moe import ExpertsInterface

from attnlib.integrations.transformers import devices, experts
from attnlib.integrations.transformers.paged_calls import LOCAL
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata


def _mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _step(paged: PagedModel, tokens: int) -> torch.Tensor:
    ids = torch.arange(2, 2 + tokens)
    batch = CommonAttentionMetadata.from_lengths([tokens], [tokens], [[1, 2, 3, 4]], 4, "cpu")
    with paged.attached():
        return paged.step(ids, torch.arange(tokens), batch)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ways that experts were computed, call by call."""
    names: list[str] = []

    def recorded(name: str) -> Any:
        original = ExpertsInterface._global_mapping[name]

        def compute(*arguments: Any) -> Any:
            names.append(name)
            return original(*arguments)

        return compute

    for name in ("grouped_mm", "batched_mm"):
        monkeypatch.setitem(ExpertsInterface._global_mapping, name, recorded(name))
    return names


def test_calls_on_a_gpu_choose_by_their_size(
    monkeypatch: pytest.MonkeyPatch, called: list[str]
) -> None:
    """As long as the copied weights are few."""
    model = _mixtral()
    before = model.get_experts_implementation()
    expected = _step(PagedModel(model, num_blocks=8, block_size=4, backend="torch"), 6)
    assert called == ["grouped_mm"] * 2  # as given, on a CPU
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    largest = 3 * 2 * 2 * 48 * 32 * 4  # three tokens, two experts each, of two matrices
    monkeypatch.setattr(experts, "COPIED_BYTES", largest)
    for tokens, way in ((3, "batched_mm"), (4, "grouped_mm"), (6, "grouped_mm")):
        called.clear()
        found = _step(PagedModel(model, num_blocks=8, block_size=4, backend="torch"), tokens)
        assert called == [way] * 2
        assert torch.allclose(found, expected[:tokens], atol=1e-5)
    monkeypatch.setattr(experts, "COPIED_IN_GRAPH", largest // 3)
    monkeypatch.setattr(LOCAL, "in_graph", True, raising=False)
    for dtype, most in ((torch.float32, 3), (torch.bfloat16, 2)):  # half of the bytes
        model.to(dtype)
        for tokens in (most, most + 1):
            called.clear()
            _step(PagedModel(model, num_blocks=8, block_size=4, backend="torch"), tokens)
            assert called == [["grouped_mm", "batched_mm"][tokens == most]] * 2
    assert model.get_experts_implementation() == before


def test_other_choices_stay(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    """Those of the user, and those of quantized models, whose experts have other functions."""
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    model = _mixtral()
    model.set_experts_implementation("batched_mm")
    monkeypatch.setattr(experts, "COPIED_BYTES", 0)
    _step(PagedModel(model, num_blocks=8, block_size=4, backend="torch"), 6)
    assert called == ["batched_mm"] * 2
    called.clear()
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(experts, "COPIED_BYTES", 2**40)
    model.hf_quantizer = object()
    _step(PagedModel(model, num_blocks=8, block_size=4, backend="torch"), 6)
    assert called == ["grouped_mm"] * 2
