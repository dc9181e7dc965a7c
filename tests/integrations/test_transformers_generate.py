"""Plain forwards and `generate`: attnlib's tokens are eager's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.integrations.transformers import masks
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.spec import Window
from tests.integrations.tiny_models import (
    DECODERS,
    bart,
    decoder,
    deepseek_v3,
    difference,
    gemma3_with_images,
    generated,
    padded,
    prompts,
    run,
    t5,
    whisper,
)

TOKENS = {"torch": 10, "triton": 3}
SIDES = {"left": (9, 5, 2), "right": (9, 7, 5)}
"""Lengths of the prompts. Behind a shorter row on the left, the window of the last query would hold no token at all: eager then averages over
padding, attnlib says 0 (M5), and neither is an answer."""


@pytest.fixture
def tokens(backend: str) -> int:
    """New tokens to compare; few where every kernel is interpreted."""
    return TOKENS[backend]


@pytest.mark.parametrize("name", DECODERS)
def test_padded_batches_generate_eagers_tokens(name: str, backend: str, tokens: int) -> None:
    """Left and right padding, in float32, greedy: prompts below, at and above the window."""
    model = decoder(name)
    for side, lengths in SIDES.items():
        batch = padded(prompts(*lengths), side)
        assert torch.equal(
            generated(model, "attnlib", batch, tokens), generated(model, "eager", batch, tokens)
        ), side


@pytest.mark.parametrize("name", DECODERS)
def test_unpadded_batches_generate_eagers_tokens(name: str, backend: str, tokens: int) -> None:
    """Without padding keys and values are read where they lie."""
    model, batch = decoder(name), padded(prompts(7, 7), "left")
    assert torch.equal(
        generated(model, "attnlib", batch, tokens), generated(model, "eager", batch, tokens)
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_static_cache_is_longer_than_its_contents(name: str, backend: str, tokens: int) -> None:
    """P5: slots that are not written yet stay unseen, in a static cache and in a static rolling one."""
    model, batch = decoder(name), padded(prompts(8, 3), "left")
    kwargs = {"cache_implementation": "static"}
    assert torch.equal(
        generated(model, "attnlib", batch, tokens, **kwargs),
        generated(model, "eager", batch, tokens, **kwargs),
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_a_forward(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of real tokens agree with eager's; those of padding behind a row too, because it sees the row there."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    batch = padded(prompts(*SIDES[side]), side)
    where = batch["attention_mask"] if side == "left" else None
    assert difference(decoder(name), lambda m: m(**batch).logits, where) < 2e-5


def test_beam_search_reorders_the_cache() -> None:
    """Beams copy and swap cache rows between steps: nothing of a step outlives it."""
    model, batch = decoder("llama"), padded(prompts(6, 4), "left")
    assert torch.equal(
        generated(model, "attnlib", batch, 6, num_beams=3),
        generated(model, "eager", batch, 6, num_beams=3),
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_prompt_in_two_pieces(name: str, backend: str) -> None:
    """M1: a second forward continues a cache; its queries stand at the end of all keys."""
    from transformers import DynamicCache

    model, batch = decoder(name), padded(prompts(8, 3), "left")
    ids, mask = batch["input_ids"], batch["attention_mask"]

    def in_pieces(m: Any) -> torch.Tensor:
        cache = DynamicCache(config=m.config)
        first = m(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits
        return torch.cat(
            [first, m(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits], dim=1
        )

    assert difference(model, in_pieces, mask) < 2e-5


def test_values_smaller_than_keys(backend: str, tokens: int) -> None:
    """P1: K and V of different head sizes, as multi-head latent attention expands them."""
    model, batch = deepseek_v3(), padded(prompts(7, 4), "left")
    assert torch.equal(
        generated(model, "attnlib", batch, tokens), generated(model, "eager", batch, tokens)
    )


def test_image_tokens_see_each_other(backend: str, tokens: int) -> None:
    """Gemma 3 with images: spans that are visible both ways, in the prompt and behind it."""
    ids = torch.tensor([[5, 61, 60, 60, 60, 60, 62, 7, 8], [9, 10, 61, 60, 60, 60, 60, 62, 3]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    model, spans = gemma3_with_images(), {"token_type_ids": (ids == 60).long()}
    assert difference(model, lambda m: m(**batch, **spans).logits) < 2e-5
    seen, unseen = (
        run(model, "attnlib", lambda m, t=types: m(**batch, token_type_ids=t).logits)
        for types in (spans["token_type_ids"], ids * 0)
    )
    assert float((seen - unseen).abs().max()) > 1e-2
    assert torch.equal(
        generated(model, "attnlib", {**batch, **spans}, tokens),
        generated(model, "eager", {**batch, **spans}, tokens),
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
    """Queries and keys of another length and another modality."""
    features, ids = (
        torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[3, 7, 9], [3, 8, 4]]),
    )
    assert (
        difference(whisper(), lambda m: m(input_features=features, decoder_input_ids=ids).logits)
        < 2e-5
    )


def test_the_position_bias_of_t5_is_honoured() -> None:
    """A bias per head goes the dense way, with padding."""
    model, batch = t5(), padded(prompts(7, 4), "right")
    kwargs = {"min_new_tokens": 6}
    assert torch.equal(
        generated(model, "attnlib", batch, 6, **kwargs),
        generated(model, "eager", batch, 6, **kwargs),
    )


def _without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks.StepMask, "padding", lambda self: None)


def _without_window(monkeypatch: pytest.MonkeyPatch) -> None:
    recognise = masks.recognise

    def blind(function: Any) -> Pattern | None:
        pattern = recognise(function)
        return pattern and Pattern(pattern.causal, Window(None, pattern.window.right))

    monkeypatch.setattr(masks, "recognise", blind)


def _window_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    recognise = masks.recognise

    def off(function: Any) -> Pattern | None:
        pattern = recognise(function)
        if pattern is None or pattern.window.left is None:
            return pattern
        return Pattern(pattern.causal, Window(pattern.window.left + 1, pattern.window.right))

    monkeypatch.setattr(masks, "recognise", off)


def _without_argument(name: str) -> Any:
    def take_out(monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers import AttentionInterface

        from attnlib.integrations.transformers.attention import attnlib_attention

        AttentionInterface.register(
            "attnlib", lambda *args, **kwargs: attnlib_attention(*args, **{**kwargs, name: None})
        )

    return take_out


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
def test_a_lost_feature_is_noticed(name: str, lose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests above: with one feature taken out, tokens and logits differ."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    model, batch = decoder(name), padded(prompts(9, 5, 2), "left")
    whole = generated(model, "attnlib", batch, 10)
    lose(monkeypatch)
    assert difference(model, lambda m: m(**batch).logits, batch["attention_mask"]) > 1e-2
    assert not torch.equal(generated(model, "attnlib", batch, 10), whole)
