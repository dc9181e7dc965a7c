"""Encoders, and queries over the keys of an encoder: calls of torch's operator on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers

import attnlib
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import attention, plain
from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.integrations.transformers.whole import attend_whole_again
from tests.integrations.tiny_models import (
    ENCODERS,
    bart,
    padded,
    prompts,
    randomized,
    run,
    t5,
    umt5,
    whisper,
)
from tests.integrations.transformers.module_calls import Module, states


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which ways the calls take that need a layer of attnlib; no validation."""
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    found: list[str] = []
    for name in ("_attend_paged", "_attend_unpaged", "attend_dense"):
        attend = getattr(plain, name)

        def recording(*args: Any, name: str = name, attend: Any = attend) -> torch.Tensor:
            found.append(name)
            out: torch.Tensor = attend(*args)
            return out

        monkeypatch.setattr(plain, name, recording)
    return found


def _bart(model: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    batch = padded(prompts(*lengths), "right")
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1}
    out = model.generate(**batch, **settings, output_logits=True, return_dict_in_generate=True)
    return torch.cat(out.logits)


@pytest.mark.parametrize("lengths", [(7,), (7, 7), (7, 3)], ids=str)
def test_an_encoder_decoder_needs_no_layer(lengths: tuple[int, ...], layers: list[str]) -> None:
    """Its cross-attention took three times as long as the operator that it calls."""
    model = bart()
    expected = run(model, "eager", lambda m: _bart(m, lengths))
    for _ in range(2):
        found = run(model, "attnlib", lambda m: _bart(m, lengths))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not layers


@pytest.mark.parametrize("make", [t5, umt5])
@pytest.mark.parametrize("lengths", [(7, 7), (7, 3)], ids=str)
def test_decodes_with_a_position_bias(
    make: Any, lengths: tuple[int, ...], layers: list[str]
) -> None:
    """Only the prompt needs layers."""
    model = make()
    expected = run(model, "eager", lambda m: _bart(m, lengths))
    found = run(model, "attnlib", lambda m: _bart(m, lengths))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert len(layers) <= 2 + 2  # of the encoder, and of the first query if it were several


def test_calls_without_a_mask_are_repeated(layers: list[str], monkeypatch: Any) -> None:
    """The modules keep what their first call has found, for calls of other sizes too."""
    model, served = whisper(), []

    def recording(*args: Any) -> torch.Tensor | None:
        out = attend_whole_again(*args)
        served.append(out is not None)
        return out

    monkeypatch.setattr(attention, "attend_whole_again", recording)
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[3, 7], [3, 9]])

    def logits(model: Any, rows: int = 1, **options: Any) -> Any:
        out = model(input_features=features[:rows], decoder_input_ids=ids[:rows], **options)
        return out if options else out.logits

    for rows in (2, 1):
        expected = run(model, "eager", partial(logits, rows=rows))
        for _ in range(2):
            found = run(model, "attnlib", partial(logits, rows=rows))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    # Encoder and cross-attention of two layers each; the second rows differ in their layout.
    assert served == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert not layers
    weights = run(model, "attnlib", partial(logits, output_attentions=True))
    assert weights.encoder_attentions[1] is not None and weights.cross_attentions[1] is not None


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("lengths", [(9, 5, 2), (9, 9), (300, 20)], ids=str)
def test_encoders(name: str, lengths: tuple[int, ...], layers: list[str]) -> None:
    """Many scores with padding are packed, which skips the padding."""
    config = ENCODERS[name]().config
    config.max_position_embeddings = 512
    model = randomized(transformers.AutoModel.from_config(config))
    batch = padded(prompts(*lengths), "right")
    real = batch["attention_mask"].bool()
    found, expected = (
        run(model, which, lambda m: m(**batch).last_hidden_state)[real]
        for which in ("attnlib", "eager")
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert bool(layers) == (max(lengths) > 128)


@pytest.mark.parametrize("how", ["another backend", "validation", "an observer"])
def test_calls_that_need_a_layer(
    how: str, layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after calls that needed none."""
    model = whisper()
    features = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0))
    given = {"input_features": features, "decoder_input_ids": torch.tensor([[3, 7]])}
    expected = run(model, "attnlib", lambda m: m(**given).logits)
    assert not layers
    seen: list[Any] = []
    backend = "torch"
    if how == "validation":
        monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    elif how == "an observer":
        OBSERVERS.append(lambda *given: seen.append(given))
    else:
        pytest.importorskip("triton")
        backend = "triton"
    try:
        with attnlib.use_backend(backend):
            found = run(model, "attnlib", lambda m: m(**given).logits)
    finally:
        OBSERVERS[:] = OBSERVERS[: len(OBSERVERS) - (how == "an observer")]
    assert len(layers) >= 4
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(3, 2, 1, 5), (1, 3, 1, 5), (1, 2, 1, 4)], ids=str)
def test_a_position_bias_of_other_sizes_is_refused(sizes: tuple[int, ...], layers: Any) -> None:
    query, key, value = (tensor.repeat(2, 1, 1, 1) for tensor in states(1, 5))
    with torch.no_grad(), pytest.raises(ContractError, match="position_bias has shape"):
        attnlib_attention(Module(), query, key, value, position_bias=torch.ones(sizes))
