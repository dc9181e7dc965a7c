"""A `DynamicCache` under attnlib appends in place, and its contents are those of transformers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from attnlib.integrations.transformers import cache_buffers, growing_cache, row_copy
from tests.integrations.tiny_models import decoder, generated, padded, prompts, run
from tests.integrations.transformers.test_repeated import MODELS, randomized
from tests.integrations.transformers.test_state_mixers import built


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are full after a few tokens."""
    monkeypatch.setattr(cache_buffers, "_LEAST_ROOM", 3)
    monkeypatch.setattr(cache_buffers, "_ROUND", 1)


@torch.no_grad()
def decoded(model: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of these tokens, one step each."""
    found = []
    for token in tokens:
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        found.append(out.logits)
    return torch.cat(found)


def compared(call: Callable[[Any], torch.Tensor]) -> None:
    """Compare attnlib with eager attention."""
    model = randomized(MODELS["llama"]())
    expected = run(model, "eager", call)
    torch.testing.assert_close(run(model, "attnlib", call), expected, atol=1e-4, rtol=1e-4)


def started(model: Any) -> Any:
    """A cache after a prompt of 5 tokens."""
    return model(torch.tensor(prompts(5)), use_cache=True, past_key_values=hf.DynamicCache())


def test_tokens_are_appended_in_place() -> None:
    """The address and the strides of a layer's keys change once per buffer, not at every token."""
    model = randomized(MODELS["llama"]())
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        cache = started(model).past_key_values
    places = []
    for token in range(4, 14):
        decoded(model, cache, [token])
        layer = cache.layers[0]
        assert layer.keys.shape[2] == layer.get_seq_length() == token + 2
        places.append((layer.keys.data_ptr(), layer.keys.stride(1)))
    assert len(set(places)) <= 4


@pytest.mark.parametrize("lengths", [(6,), (9, 4)], ids=["one", "padded"])
def test_generate(lengths: tuple[int, ...]) -> None:
    """More tokens than a buffer has room for, also with beams, whose caches are reordered."""
    model = decoder("llama")
    batch = padded(prompts(*lengths), "left")
    for options in ({}, {"num_beams": 3}):
        expected = generated(model, "eager", batch, 12, **options)
        assert torch.equal(generated(model, "attnlib", batch, 12, **options), expected)


def test_crop() -> None:
    """Rejected tokens are overwritten, as in assisted decoding."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        first = decoded(model, cache, [7, 8, 9])
        cache.crop(-2)
        return torch.cat([first, decoded(model, cache, [3, 4, 5, 6])])

    compared(call)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_independent(copied: Callable[[Any], Any]) -> None:
    """Two continuations of one prefix do not write to the same memory."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        decoded(model, cache, [7, 8])
        other = copied(cache)
        found = []
        for one, two in ((9, 10), (11, 12), (13, 14)):
            found += [decoded(model, cache, [one]), decoded(model, other, [two])]
        return torch.cat(found)

    compared(call)


def test_shallow_copies_are_independent() -> None:
    """A layer that shares its tensors with another one by a shallow copy."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        decoded(model, cache, [7, 8])
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        found = []
        for one, two in ((9, 10), (11, 12), (13, 14)):
            found += [decoded(model, cache, [one]), decoded(model, other, [two])]
        return torch.cat(found)

    compared(call)


def test_between_inference_mode_and_no_grad() -> None:
    """Buffers made in inference mode take tokens outside of it."""

    def call(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            cache = started(model).past_key_values
            first = decoded(model, cache, [7, 8]).clone()
        return torch.cat([first, decoded(model, cache, [9, 10])])

    compared(call)


def test_other_implementations_concatenate() -> None:
    """Only layers that attnlib serves have buffers."""
    model = decoder("llama")
    model.set_attn_implementation("sdpa")
    before = len(growing_cache._buffers)
    with torch.no_grad():
        cache = started(model).past_key_values
    decoded(model, cache, [7, 8])
    assert len(growing_cache._buffers) == before
    assert cache.layers[0].keys.is_contiguous()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of buffers that were made."""
    found: list[int] = []
    of = cache_buffers.Buffers.of

    def noted(kept: Any, states: Any, window: int | None) -> Any:
        found.append(kept[0].shape[2] + states[0].shape[2])
        return of(kept, states, window)

    monkeypatch.setattr(cache_buffers.Buffers, "of", noted)
    return found


def test_reordered_layers_have_no_buffers(made: list[int]) -> None:
    """Beams replace the tensors of a layer at every token."""
    generated(decoder("llama"), "attnlib", padded(prompts(6), "left"), 12, num_beams=3)
    assert not made


@torch.no_grad()
def test_the_first_token_after_a_prompt_moves_the_layers(made: list[int]) -> None:
    """A prompt alone copies nothing, also in parts."""
    model = randomized(MODELS["llama"]())
    model.set_attn_implementation("attnlib")
    cache = started(model).past_key_values
    model(torch.tensor([[4, 5, 6]]), past_key_values=cache, use_cache=True)
    assert not made
    decoded(model, cache, [7])
    assert made == [9] * model.config.num_hidden_layers
    assert cache_buffers.capacity_of(cache.layers[0].keys, cache.layers[0].values) is not None


@torch.no_grad()
def test_what_appends_the_next_token_is_prepared_with_the_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token that moves a layer compiles what later ones launch, over its own place."""
    events: list[tuple[str, int]] = []
    run = row_copy.RowCopy.run

    def prepared(self: Any, key: Any, value: Any, keys: Any, values: Any, place: int) -> None:
        assert torch.equal(keys[:, :, place : place + 1], key)
        assert torch.equal(values[:, :, place : place + 1], value)
        events.append(("prepared", place))

    def counted(self: Any, *token: Any) -> None:
        events.append(("appended", token[-1]))
        run(self, *token)

    monkeypatch.setattr(row_copy.RowCopy, "prepare", prepared)
    monkeypatch.setattr(row_copy.RowCopy, "run", counted)
    model = randomized(MODELS["llama"]())
    model.set_attn_implementation("attnlib")
    cache = started(model).past_key_values
    decoded(model, cache, [7, 8, 9, 10, 11])  # buffers of three more tokens
    layers = model.config.num_hidden_layers
    steps = [("prepared", 5), *(("appended", place) for place in (6, 7, 8)), ("prepared", 9)]
    assert events == [event for event in steps for _ in range(layers)]


def _snapshot(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _restored(cache: Any, states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        layer.keys, layer.values = keys, values


def test_kept_tensors_do_not_change() -> None:
    """Candidates that are kept, cropped and continued, as in a search over continuations."""

    def call(model: Any) -> torch.Tensor:
        cache, kept = started(model).past_key_values, []
        decoded(model, cache, [7])
        for token in (3, 9, 4):
            decoded(model, cache, [token, token + 1])
            kept.append(_snapshot(cache))
            cache.crop(-2)
        found = []
        for states in kept:
            found.append(decoded(model, hf.DynamicCache(states), [5]))
        return torch.cat(found)

    compared(call)


def test_restored_snapshots() -> None:
    """Two continuations of one prefix by tensors that are put back."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        decoded(model, cache, [7])
        first = _snapshot(cache)
        decoded(model, cache, [8])
        second = _snapshot(cache)
        _restored(cache, first)
        decoded(model, cache, [9])
        _restored(cache, second)
        return decoded(model, cache, [5])

    compared(call)


def test_a_cropped_original_leaves_its_shallow_copy() -> None:
    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        decoded(model, cache, [7, 8])
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        cache.crop(-1)
        decoded(model, cache, [9])
        return decoded(model, other, [5])

    compared(call)


def test_memory_that_is_exchanged_below_a_tensor() -> None:
    """`keys.data = ...` and `keys.set_(...)` keep the tensor object."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        decoded(model, cache, [7, 8])
        for layer in cache.layers:
            layer.keys.data = layer.keys.data * 2
        first = decoded(model, cache, [9])
        for layer in cache.layers:
            layer.values.set_(layer.values.flip(2).contiguous())
        return torch.cat([first, decoded(model, cache, [5, 6])])

    compared(call)


def test_a_token_inserted_before_kept_tokens() -> None:
    """`update` with views of the layer's own keys and values."""

    def call(model: Any) -> torch.Tensor:
        cache = started(model).past_key_values
        decoded(model, cache, [7, 8, 9])
        tails = [(layer.keys[:, :, -3:], layer.values[:, :, -3:]) for layer in cache.layers]
        cache.crop(-3)
        decoded(model, cache, [5])
        for layer, states in zip(cache.layers, tails, strict=True):
            layer.update(*states)
        return decoded(model, cache, [4])

    compared(call)


def test_tensors_that_autograd_has_saved() -> None:
    """Appending does not raise the version of views that a graph holds."""
    model = randomized(MODELS["llama"]())
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        cache = started(model).past_key_values
    decoded(model, cache, [7, 8])
    weight = torch.ones(1, requires_grad=True)
    loss = (cache.layers[0].keys * weight).sum()
    decoded(model, cache, [9])
    loss.backward()
    assert torch.isfinite(weight.grad).all()


def test_a_prompt_with_gradients_leaves_none_in_the_buffers() -> None:
    """The buffers would keep its graph, and could not be copied."""
    model = randomized(MODELS["llama"]())
    model.set_attn_implementation("attnlib")
    cache = started(model).past_key_values
    assert cache.layers[0].keys.requires_grad
    decoded(model, cache, [7, 8])
    assert not any(x.keys.requires_grad or x.values.requires_grad for x in cache.layers)
    copy.deepcopy(cache)


def test_a_reset_cache_grows_again() -> None:
    model = randomized(MODELS["llama"]())
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        cache = started(model).past_key_values
        decoded(model, cache, [7, 8])
        cache.reset()
        model(torch.tensor(prompts(5)), use_cache=True, past_key_values=cache)
    decoded(model, cache, [7, 8])
    assert growing_cache._buffers[cache.layers[0]] is not None


def test_layers_with_states_grow_in_place(made: list[int]) -> None:
    """A hybrid layer keeps keys beside the states of its mixer."""
    model, batch = built("falcon_h1"), padded(prompts(6), "left")
    expected = generated(model, "eager", batch, 12)
    assert torch.equal(generated(model, "attnlib", batch, 12), expected)
    assert len(made) >= 2 * model.config.num_hidden_layers
