"""Plain forwards and `generate` of decoders: the tokens equal those of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import devices, masks, step_mask
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.spec import Window
from tests.integrations.tiny_models import (
    DECODERS,
    bart,
    bigbird_pegasus,
    decoder,
    deepseek_v3,
    difference,
    doge,
    gemma3_with_images,
    gemma4_with_images,
    gemma4_with_shared_layers,
    generated,
    git,
    llama4,
    padded,
    paligemma,
    prompts,
    run,
    t5,
    t5gemma2,
    whisper,
)

TOKENS = {"torch": 10, "triton": 3}
SIDES = {"left": (9, 5, 2), "right": (9, 7, 5)}
"""Prompt lengths. With shorter rows and right padding, the window of the last query has no token:
eager then averages over padding and attnlib returns 0 (M5), and neither is meaningful."""


@pytest.fixture
def tokens(backend: str) -> int:
    """New tokens to compare; few with interpreted kernels."""
    return TOKENS[backend]


@pytest.mark.parametrize("name", DECODERS)
def test_padded_batches(name: str, backend: str, tokens: int) -> None:
    """Left and right padding, in float32, greedy: prompts below, at and above the window."""
    model = decoder(name)
    for side, lengths in SIDES.items():
        batch = padded(prompts(*lengths), side)
        assert torch.equal(
            generated(model, "attnlib", batch, tokens), generated(model, "eager", batch, tokens)
        ), side


@pytest.mark.parametrize("name", DECODERS)
def test_unpadded_batches(name: str, backend: str, tokens: int) -> None:
    """Without padding keys and values are read in place."""
    model, batch = decoder(name), padded(prompts(7, 7), "left")
    assert torch.equal(
        generated(model, "attnlib", batch, tokens), generated(model, "eager", batch, tokens)
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_static_cache_is_longer_than_its_contents(name: str, backend: str, tokens: int) -> None:
    """P5: unwritten slots stay invisible, in a static cache and in a static sliding cache."""
    model, batch = decoder(name), padded(prompts(8, 3), "left")
    kwargs = {"cache_implementation": "static"}
    assert torch.equal(
        generated(model, "attnlib", batch, tokens, **kwargs),
        generated(model, "eager", batch, tokens, **kwargs),
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_a_forward(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of tokens agree with eager; with right padding those of padding queries too."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    batch = padded(prompts(*SIDES[side]), side)
    where = batch["attention_mask"] if side == "left" else None
    assert difference(decoder(name), lambda m: m(**batch).logits, where) < 2e-5


def test_beam_search_reorders_the_cache() -> None:
    """Beams copy and exchange cache rows between steps: no state outlives its step."""
    model, batch = decoder("llama"), padded(prompts(6, 4), "left")
    assert torch.equal(
        generated(model, "attnlib", batch, 6, num_beams=3),
        generated(model, "eager", batch, 6, num_beams=3),
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_prompt_in_two_chunks(name: str, backend: str) -> None:
    """M1: a second forward continues a cache; its queries are the last tokens of the keys."""
    from transformers import DynamicCache

    model, batch = decoder(name), padded(prompts(8, 3), "left")
    ids, mask = batch["input_ids"], batch["attention_mask"]

    def in_chunks(m: Any) -> torch.Tensor:
        cache = DynamicCache(config=m.config)
        first = m(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits
        return torch.cat(
            [first, m(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits], dim=1
        )

    assert difference(model, in_chunks, mask) < 2e-5


def test_values_smaller_than_keys(backend: str, tokens: int) -> None:
    """P1: K and V of different head sizes, as multi-head latent attention expands them."""
    model, batch = deepseek_v3(), padded(prompts(7, 4), "left")
    assert torch.equal(
        generated(model, "attnlib", batch, tokens), generated(model, "eager", batch, tokens)
    )


IDS = [[5, 61, 60, 60, 60, 60, 62, 7, 8], [9, 10, 61, 60, 60, 60, 60, 62, 3]]


def _with_images(name: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(model, inputs, the types of tokens that make images bidirectional)."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.tensor(IDS)
    if name == "paligemma":  # images come first, and the whole prompt is bidirectional
        ids = torch.tensor([[60] * 4 + row[7:] + [11, 12] for row in IDS])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "gemma4":
        places = torch.tensor([[x, y] for y in range(4) for x in range(4)])
        batch["image_position_ids"] = places.repeat(2, 1, 1)
        batch["pixel_values"] = torch.rand(2, 16, 48, generator=draw)
        return gemma4_with_images(), batch, {"mm_token_type_ids": (ids == 60).long()}
    batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=draw)
    if name == "paligemma":
        return paligemma(), batch, {"token_type_ids": ids * 0}
    return gemma3_with_images(), batch, {"token_type_ids": (ids == 60).long()}


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "paligemma"])
def test_image_tokens_see_each_other(
    name: str, backend: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in the prompt: token-identical by a score function, without a [T, S] mask."""
    model, batch, spans = _with_images(name)
    expected = generated(model, "eager", {**batch, **spans}, tokens)
    causal = {key: torch.ones_like(value) for key, value in spans.items()}
    if name != "paligemma":
        causal = {key: value * 0 for key, value in spans.items()}
    with_spans, without = (
        run(model, "attnlib", lambda m, t=types: m(**batch, **t).logits)
        for types in (spans, causal)
    )
    assert float((with_spans - without).abs().max()) > 1e-2
    assert difference(model, lambda m: m(**batch, **spans).logits) < 2e-5

    def evaluated(step: StepMask) -> torch.Tensor:
        raise AssertionError("a [T, S] mask was made")

    monkeypatch.setattr(StepMask, "dense", evaluated)
    assert torch.equal(generated(model, "attnlib", {**batch, **spans}, tokens), expected)


def test_image_tokens_behind_padding(backend: str, tokens: int) -> None:
    """Spans count the tokens of a row, not its padding."""
    model, batch, spans = _with_images("gemma3")
    for key in ("input_ids", "attention_mask"):
        batch[key] = torch.nn.functional.pad(batch[key], (2, 0))
    batch["attention_mask"][1, :2] = 1
    batch["input_ids"][1, :2] = 4
    types = torch.nn.functional.pad(spans["token_type_ids"], (2, 0))
    inputs = {**batch, "token_type_ids": types}
    assert torch.equal(
        generated(model, "attnlib", inputs, tokens), generated(model, "eager", inputs, tokens)
    )


def test_cross_attention_of_bart(backend: str, tokens: int) -> None:
    """Encoder, causal decoder and cross attention over a padded encoder batch."""
    model, batch = bart(), padded(prompts(7, 4), "right")
    kwargs = {"min_new_tokens": tokens}
    assert torch.equal(
        generated(model, "attnlib", batch, tokens, **kwargs),
        generated(model, "eager", batch, tokens, **kwargs),
    )


def test_cross_attention_of_whisper(backend: str) -> None:
    """Queries and keys of different lengths and modalities."""
    features, ids = (
        torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[3, 7, 9], [3, 8, 4]]),
    )
    assert (
        difference(whisper(), lambda m: m(input_features=features, decoder_input_ids=ids).logits)
        < 2e-5
    )


def test_the_position_bias_of_t5() -> None:
    """A bias per head is computed densely, with padding."""
    model, batch = t5(), padded(prompts(7, 4), "right")
    kwargs = {"min_new_tokens": 6}
    assert torch.equal(
        generated(model, "attnlib", batch, 6, **kwargs),
        generated(model, "eager", batch, 6, **kwargs),
    )


def _without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks.StepMask, "padding", lambda self: None)


def _without_window(monkeypatch: pytest.MonkeyPatch) -> None:
    recognize = masks.recognize

    def without(function: Any) -> Pattern | None:
        pattern = recognize(function)
        return pattern and Pattern(pattern.causal, Window(None, pattern.window.right))

    monkeypatch.setattr(masks, "recognize", without)


def _window_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    recognize = masks.recognize

    def wider(function: Any) -> Pattern | None:
        pattern = recognize(function)
        if pattern is None or pattern.window.left is None:
            return pattern
        return Pattern(pattern.causal, Window(pattern.window.left + 1, pattern.window.right))

    monkeypatch.setattr(masks, "recognize", wider)


def _without_argument(name: str) -> Any:
    def remove(monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers import AttentionInterface

        from attnlib.integrations.transformers.attention import attnlib_attention

        AttentionInterface.register(
            "attnlib", lambda *args, **kwargs: attnlib_attention(*args, **{**kwargs, name: None})
        )

    return remove


@pytest.mark.parametrize(
    ("name", "lose"),
    [
        ("llama", _without_padding),
        ("mistral", _without_window),
        ("mistral", _window_one_off),
        ("gemma2", _without_argument("softcap")),
        ("gpt_oss", _without_argument("s_aux")),
        ("gemma3", _without_argument("scaling")),
    ],
)
def test_a_lost_feature_changes_the_tokens(
    name: str, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifies the tests above: without one feature, tokens and logits differ."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    model, batch = decoder(name), padded(prompts(9, 5, 2), "left")
    whole = generated(model, "attnlib", batch, 10)
    lose(monkeypatch)
    assert difference(model, lambda m: m(**batch).logits, batch["attention_mask"]) > 1e-2
    assert not torch.equal(generated(model, "attnlib", batch, 10), whole)


@pytest.mark.parametrize("model", [git, doge, gemma4_with_shared_layers])
def test_models_that_compute_with_the_mask(model: Any) -> None:
    """Layers that add, index or combine the mask get the values of the eager mask."""
    built, batch = model(), padded(prompts(9, 5), "left")
    assert difference(built, lambda m: m(**batch).logits, batch["attention_mask"]) < 2e-5
    assert torch.equal(generated(built, "attnlib", batch, 4), generated(built, "eager", batch, 4))


@pytest.mark.parametrize("model", [bigbird_pegasus, t5gemma2])
def test_encoder_decoders_that_compute_with_the_mask(model: Any) -> None:
    """A mask that is added to scores, and one that is concatenated with the encoder's."""
    batch, ids = padded(prompts(9, 5), "right"), torch.tensor(prompts(4, 4))
    assert difference(model(), lambda m: m(**batch, decoder_input_ids=ids).logits) < 2e-5


def test_chunked_layers_that_drop_keys(backend: str) -> None:
    """Llama 4 generates past its chunk size of 6, on a required backend, with left padding."""
    model, batch = llama4(attn_temperature_tuning=False), padded(prompts(9, 5), "left")
    assert torch.equal(generated(model, "attnlib", batch, 8), generated(model, "eager", batch, 8))


@pytest.mark.slow
def test_several_queries_of_a_chunked_layer_that_dropped_keys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Computed by torch, with a warning where another backend is selected automatically, or refused
    with the cause if another backend is required."""
    pytest.importorskip("triton")
    from transformers import DynamicCache

    from attnlib.backends.triton import TritonBackend
    from attnlib.integrations.transformers import dense

    model, ids = llama4(attn_temperature_tuning=False), torch.tensor(prompts(14, 14))

    def in_chunks(m: Any) -> torch.Tensor:
        cache = DynamicCache(config=m.config)
        first = m(ids[:, :11], past_key_values=cache).logits
        return torch.cat([first, m(ids[:, 11:], past_key_values=cache).logits], dim=1)

    with monkeypatch.context() as auto:
        auto.setattr(dense, "get_attn_backend", lambda *args: TritonBackend)
        assert difference(model, in_chunks) < 2e-5
    assert "torch instead of triton: a chunked layer has dropped keys" in caplog.text
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    with pytest.raises(
        UnsupportedConfigError, match="chunked layer has dropped keys .* requires triton"
    ):
        run(model, "attnlib", in_chunks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_decodes_do_not_read_the_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the padding mask is read once, for the prefill; decodes plan on the device."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    reads, read = [], step_mask.Rows.read
    monkeypatch.setattr(step_mask.Rows, "read", lambda *args: reads.append(args) or read(*args))
    model = llama4(attn_temperature_tuning=False) if name == "llama4" else decoder(name)
    batch = padded(prompts(9, 2, 7), "left")
    batch["attention_mask"][0, 3:5] = 0
    assert torch.equal(generated(model, "attnlib", batch, 4), generated(model, "eager", batch, 4))
    assert {queries for _, queries in reads} == {9}, "only the prefill reads the mask"
