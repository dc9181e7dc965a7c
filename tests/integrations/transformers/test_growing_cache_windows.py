"""Sliding layers of a `DynamicCache` move their window through buffers instead of copying it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from attnlib.integrations.transformers import cache_buffers, growing_cache
from tests.integrations.tiny_models import WINDOW, decoder, generated, padded, prompts, run

ROOM = 3


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are full after a few tokens."""
    monkeypatch.setattr(cache_buffers, "_LEAST_ROOM", ROOM)
    monkeypatch.setattr(cache_buffers, "_ROUND", 1)


def started(model: Any, tokens: int = 3) -> Any:
    """A cache with windows after a prompt."""
    cache = hf.DynamicCache(config=model.config)
    return model(torch.tensor(prompts(tokens)), use_cache=True, past_key_values=cache)


def decoded(model: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of these tokens, one step each."""
    steps = (torch.tensor([[token]]) for token in tokens)
    return torch.cat([model(ids, past_key_values=cache, use_cache=True).logits for ids in steps])


def compared(call: Callable[[Any], torch.Tensor]) -> None:
    """Compare attnlib with eager attention."""
    model = decoder("gemma3")
    expected = run(model, "eager", call)
    torch.testing.assert_close(run(model, "attnlib", call), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(2,), (4,), (5,), (9,), (9, 4)], ids=str)
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "mistral"])
def test_tokens_equal_eager(name: str, lengths: tuple[int, ...]) -> None:
    """Prompts below, at and above the window, and more tokens than buffers have room for."""
    model, batch = decoder(name), padded(prompts(*lengths), "left")
    expected = generated(model, "eager", batch, 14)
    assert torch.equal(generated(model, "attnlib", batch, 14), expected)


@torch.no_grad()
def test_a_window_moves_in_place() -> None:
    """The layer keeps what transformers keeps, at strides that stay once the window is full, and
    is copied once per buffer."""
    model = decoder("gemma3")
    model.set_attn_implementation("attnlib")
    reference, cache = started(model), started(model).past_key_values
    del reference
    layer, addresses, strides = cache.layers[0], [], set()
    for token in range(4, 24):
        decoded(model, cache, [token])
        kept = min(token, WINDOW - 1)
        assert layer.keys.shape[2] == layer.values.shape[2] == kept
        assert layer.get_seq_length() == token
        addresses.append(layer.keys.untyped_storage().data_ptr())
        if token > WINDOW:
            strides.add(layer.keys.stride())
    assert len(strides) == 1
    buffers = [addresses[0]]
    buffers += [now for before, now in zip(addresses, addresses[1:], strict=False) if now != before]
    assert len(buffers) <= 2 + 20 // (ROOM + 1)


def test_the_contents_are_those_of_transformers() -> None:
    """Keys and values after each token."""

    def call(model: Any) -> torch.Tensor:
        cache, found = started(model).past_key_values, []
        for token in range(5, 18):
            decoded(model, cache, [token])
            layer = cache.layers[0]
            found += [layer.keys.flatten(), layer.values.flatten()]
        return torch.cat(found)

    compared(call)


def test_several_tokens_after_decodes() -> None:
    """The next turn of a conversation concatenates; decodes after it move in place again."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        first = decoded(model, cache, [7, 8, 9, 3])
        turn = torch.tensor([[4, 5, 6]])
        second = model(turn, past_key_values=cache, use_cache=True).logits[0]
        found = torch.cat([first[:, 0], second, decoded(model, cache, [5, 6, 7])[:, 0]])
        if model.config._attn_implementation == "attnlib":
            known = growing_cache._buffers[cache.layers[0]]
            assert isinstance(known, cache_buffers.Buffers) and known.window == WINDOW
        return found

    compared(call)


def test_kept_tensors_do_not_change() -> None:
    """Snapshots of a window that moves on, restored and continued."""

    def call(model: Any) -> torch.Tensor:
        cache, kept, found = started(model, 6).past_key_values, [], []
        for token in (7, 8, 9, 10, 11):
            decoded(model, cache, [token])
            layer = cache.layers[0]
            kept.append((layer.keys, layer.values, layer.keys.clone(), layer.values.clone()))
        for keys, values, keys_then, values_then in kept:
            assert torch.equal(keys, keys_then) and torch.equal(values, values_then)
        cache.layers[0].keys, cache.layers[0].values = kept[1][:2]
        found.append(decoded(model, cache, [5, 6]))
        return torch.cat(found)

    compared(call)


@pytest.mark.parametrize("crop", [-1, 0])
def test_assisted_decoding_keeps_the_past(crop: int) -> None:
    """A layer that records its past is cropped beyond its window, and does not move."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model, 6).past_key_values
        first = decoded(model, cache, [7, 8])
        for layer in cache.layers:
            getattr(layer, "activate_past_recording", lambda: None)()
        found = [first]
        for token in (9, 10, 3):
            found.append(decoded(model, cache, [token]))
            cache.crop(crop)
        return torch.cat(found)

    compared(call)


def test_copies_are_independent() -> None:
    """Two continuations of one prefix do not write to the same memory."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model, 6).past_key_values
        decoded(model, cache, [7, 8])
        shallow = copy.copy(cache)
        shallow.layers = [copy.copy(layer) for layer in cache.layers]
        others, found = [cache, copy.deepcopy(cache), shallow], []
        for step in range(4):
            found += [decoded(model, each, [9 + step + n]) for n, each in enumerate(others)]
        return torch.cat(found)

    compared(call)


def test_rows_that_are_not_aligned_concatenate() -> None:
    """Kernels read vectors of 16 bytes from the first key of the window."""
    layer = hf.cache_utils.DynamicSlidingWindowLayer(WINDOW)
    for size, moves in ((4, True), (3, False)):
        layer = hf.cache_utils.DynamicSlidingWindowLayer(WINDOW)
        with torch.no_grad():
            for tokens in (6, 1, 1):
                states = torch.ones(1, 1, tokens, size), torch.ones(1, 1, tokens, 4)
                growing_cache.note_served(*layer.update(*states))
        assert isinstance(growing_cache._buffers[layer], cache_buffers.Buffers) is moves
