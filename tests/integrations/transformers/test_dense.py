"""Masks that need a `[T, S]` tensor."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers import dense
from attnlib.integrations.transformers.attention import attnlib_attention
from tests.integrations.tiny_models import decoder, prompts, run
from tests.integrations.transformers.module_calls import Module, states


@pytest.mark.parametrize("as_float", [True, False])
def test_a_mask_of_the_user(as_float: bool, backend: str) -> None:
    """A 4-D mask, bool or added to the scores, that is no padding mask."""
    ids = torch.tensor(prompts(7, 7))
    mask = (torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.4) | torch.eye(
        7, dtype=torch.bool
    )
    model, added = decoder("llama"), torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = run(model, "eager", lambda m: m(ids, attention_mask=added).logits)
    found = run(
        model, "attnlib", lambda m: m(ids, attention_mask=added if as_float else mask).logits
    )
    assert float((found - expected).abs().max()) < 2e-5
    assert float((run(model, "attnlib", lambda m: m(ids).logits) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_mask_of_documents_over_a_cache(name: str) -> None:
    """A chunk of 40 queries after 30 keys."""
    query, key, value = (torch.randn(2, heads, n, 8) for heads, n in ((4, 40), (2, 70), (2, 70)))
    places = torch.arange(70)
    documents = torch.tensor([0] * 25 + [1] * 20 + [2] * 25)
    mask = (documents[30:, None] == documents) & (places[30:, None] >= places)
    mask = torch.stack([mask, mask & (places >= 10)])[:, None]
    fields: dict[str, object] = {}
    if name == "gemma2":
        fields["softcap"] = 2.0
    if name == "gpt_oss":
        fields["s_aux"] = torch.randn(4)
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    if name == "gemma2":
        scores = torch.tanh(scores / 2.0) * 2.0
    scores = scores.masked_fill(~mask, -torch.inf)
    if name == "gpt_oss":
        sinks = fields["s_aux"].view(1, 4, 1, 1).expand(2, 4, 40, 1)  # type: ignore[attr-defined]
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :70]
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    found, _ = attnlib_attention(Module(), query, key, value, mask, **fields)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_mask_of_more_keys_than_a_window_keeps(tokens: int) -> None:
    """A 4-D mask of all tokens, whose columns are not those of the keys in a layer's cache."""
    model = decoder("gemma3")
    cache = DynamicCache(config=model.config)
    run(model, "attnlib", lambda m: m(torch.tensor(prompts(7, 7)), past_key_values=cache))
    mask = torch.ones(2, 1, tokens, 7 + tokens, dtype=torch.bool)
    mask[..., :3] = False
    fields = {"attention_mask": mask, "past_key_values": cache}
    with pytest.raises(ContractError, match=rf"1, {tokens}, {7 + tokens}\).*cache has kept"):
        run(model, "attnlib", lambda m: m(torch.full((2, tokens), 5), **fields))


@pytest.mark.parametrize("keys", [3, 5])
def test_a_mask_of_integers_is_refused(keys: int) -> None:
    """Eager attention adds the numbers 1 and 0 to the scores, which hides nothing."""
    mask = torch.ones(3, keys, dtype=torch.long).tril(keys - 3)[None, None]
    with pytest.raises(ContractError, match=r"attention_mask is torch.int64; .* with .bool\(\)"):
        attnlib_attention(Module(), *states(3, keys), mask)


def test_a_required_backend_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch computes a bias per head and position; with a required triton that is an error."""
    pytest.importorskip("triton")
    bias = torch.arange(18.0).view(1, 2, 3, 3) % 5
    attnlib_attention(Module(), *states(), position_bias=bias)
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    with pytest.raises(
        UnsupportedConfigError,
        match="Module.7: the model adds a position bias.*ATTNLIB_BACKEND requires triton.*'torch'",
    ):
        attnlib_attention(Module(), *states(), position_bias=bias)


def test_torch_instead_of_the_selected_backend_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once per module, with the reason."""
    pytest.importorskip("triton")
    from attnlib.backends.triton import TritonBackend

    monkeypatch.setattr(dense, "get_attn_backend", lambda *args: TritonBackend)
    module, bias = Module(), torch.arange(18.0).view(1, 2, 3, 3) % 5
    for _ in range(2):
        attnlib_attention(module, *states(), position_bias=bias)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "Module.7: torch instead of triton: the model adds a position bias to the scores"
    )
