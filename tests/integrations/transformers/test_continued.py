"""The first layer of a step continues the plan of the step before, and only where it is its own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import attnlib
from attnlib.integrations.transformers import (
    cache_buffers,
    continued,
    decode_batch,
    devices,
    repeated,
)
from tests.integrations.tiny_models import WINDOW, decoder, generated, padded, prompts, run

NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a GPU, with interpreted kernels and buffers that grow often."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(cache_buffers, "_LEAST_ROOM", 3)
    monkeypatch.setattr(cache_buffers, "_ROUND", 4)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each first layer of a step, whether it continued the step before."""
    found: list[bool] = []

    def counted(*args: Any) -> Any:
        made = continued.continue_step(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(repeated, "continue_step", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(7,), (7, 4)], ids=["one", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_tokens_equal_eager(name: str, lengths: tuple[int, ...], steps: list[bool]) -> None:
    """Also where the buffers are replaced by larger ones."""
    model, batch = decoder(name), padded(prompts(*lengths), "left")
    expected = generated(model, "eager", batch, NEW_TOKENS)
    assert torch.equal(generated(model, "attnlib", batch, NEW_TOKENS), expected)
    assert sum(steps) >= NEW_TOKENS // 2 and not all(steps)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(7,), (7, 4)], ids=["one", "padded"])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_full_window_keeps_its_batch(
    name: str, lengths: tuple[int, ...], steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window has the same number of keys in every step, once it is full."""
    made: list[int] = []
    make = decode_batch._make

    def counted(batch: int, bound: int, *args: Any) -> Any:
        made.append(bound)
        return make(batch, bound, *args)

    monkeypatch.setattr(decode_batch, "_make", counted)
    vars(decode_batch._local).clear()  # those of other tests
    model, batch = decoder(name), padded(prompts(*lengths), "left")
    expected = generated(model, "eager", batch, NEW_TOKENS)
    assert torch.equal(generated(model, "attnlib", batch, NEW_TOKENS), expected)
    assert made.count(WINDOW) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(7,), (7, 4)], ids=["one", "padded"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_static_cache_keeps_its_batch(
    name: str, lengths: tuple[int, ...], steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same number of keys in every step, of which the mask shows those written."""
    model, batch = decoder(name), padded(prompts(*lengths), "left")
    static = {"cache_implementation": "static"}
    expected = generated(model, "eager", batch, NEW_TOKENS, **static)
    assert torch.equal(generated(model, "attnlib", batch, NEW_TOKENS, **static), expected)
    kinds = 1 if name == "llama" else 2
    assert sum(steps) >= kinds * (NEW_TOKENS - 3)


def _decode(model: Any, change: Any) -> torch.Tensor:
    """Logits of six steps of two rows, the first of them padded; `change(step, mask)` comes before
    each step and returns the mask."""
    batch = padded(prompts(4, 7), "left")
    caches = model(**batch, use_cache=True).past_key_values
    mask, found = batch["attention_mask"], []
    for step in range(6):
        mask = change(step, torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1))
        ids = torch.tensor([[5 + step], [9]])
        out = model(ids, attention_mask=mask, past_key_values=caches, use_cache=True)
        found.append(out.logits)
    return torch.cat(found)


@pytest.mark.slow
def test_a_hidden_token_is_noticed(steps: list[bool]) -> None:
    """Padding may change between two steps: it is read in each."""
    model = decoder("llama")

    def hide(step: int, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.clone()
        mask[1, 3] = step < 4
        return mask

    expected = run(model, "eager", lambda m: _decode(m, hide))
    found = run(model, "attnlib", lambda m: _decode(m, hide))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert any(steps)


@pytest.mark.slow
def test_another_backend_is_noticed(steps: list[bool]) -> None:
    """Selection is asked in each step."""
    model, used = decoder("llama"), []

    def switch(step: int, mask: torch.Tensor) -> torch.Tensor:
        used.append(len(steps))
        if step == 4:
            torch_only.__enter__()
        return mask

    torch_only = attnlib.use_backend("torch")
    expected = run(model, "eager", lambda m: _decode(m, lambda _, mask: mask))
    try:
        found = run(model, "attnlib", lambda m: _decode(m, switch))
    finally:
        torch_only.__exit__(None, None, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert any(steps[: used[4]]) and not any(steps[used[4] :])


@pytest.mark.slow
def test_two_caches_take_turns(steps: list[bool]) -> None:
    """Each step fills the batch for its own mask, and reads its own keys."""
    model = decoder("llama")

    def both(model: Any) -> torch.Tensor:
        batches = [padded(prompts(4, 7), "left"), padded(prompts(7, 2, seed=3), "left")]
        caches = [model(**batch, use_cache=True).past_key_values for batch in batches]
        masks, found = [batch["attention_mask"] for batch in batches], []
        for step in range(5):
            for row, cache in enumerate(caches):
                masks[row] = torch.cat([masks[row], torch.ones(2, 1, dtype=torch.long)], dim=1)
                ids = torch.tensor([[5 + step], [9 + row]])
                out = model(ids, attention_mask=masks[row], past_key_values=cache, use_cache=True)
                found.append(out.logits)
        return torch.cat(found)

    expected = run(model, "eager", both)
    torch.testing.assert_close(run(model, "attnlib", both), expected, rtol=1e-4, atol=1e-4)
    assert any(steps)


@pytest.mark.slow
def test_nothing_holds_the_keys_of_a_cache_that_is_gone(
    steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next step may continue ends with the cache, not with the model."""
    make = cache_buffers.Buffers.of

    def noted(*args: Any) -> Any:
        made = make(*args)
        held.append(made.keys.data_ptr())
        return made

    held: list[int] = []
    monkeypatch.setattr(cache_buffers.Buffers, "of", noted)
    model = decoder("llama")
    generated(model, "attnlib", padded(prompts(7, 4), "left"), NEW_TOKENS)
    gc.collect()
    assert any(steps) and held
    alive = {
        x.untyped_storage().data_ptr()
        for x in gc.get_objects()
        if type(x) is torch.Tensor and x.device.type == "cpu"
    }
    assert not alive & set(held)
