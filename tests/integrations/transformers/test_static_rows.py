"""Tokens that are copied to their place in a static cache, beside what transformers does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from attnlib.integrations.transformers import static_rows
from tests.integrations.tiny_models import decoder, generated, padded, prompts
from tests.integrations.transformers.launched_operations import LaunchedOperations

CAPACITY, HEADS, SIZE = 6, 2, 4
Update = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Change = Callable[[Any], Any]


def states(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Keys and values `[1, H, T, D]`, in the strides of a model."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2, 1, tokens, HEADS, SIZE, generator=generator).to(dtype)
    return list(made.transpose(2, 3))


@pytest.fixture
def original(registered: None) -> Update:
    """`StaticLayer.update` of transformers."""
    from attnlib.integrations.transformers import registration

    (found,) = (
        function
        for owner, name, function in registration._replaced
        if owner is hf.cache_utils.StaticLayer and name == "update"
    )
    update: Update = found
    return update


def layer_of_a_model(implementation: str = "attnlib") -> Any:
    """An initialized layer that holds three tokens."""
    config = decoder("llama").config
    config._attn_implementation = implementation
    layer = hf.StaticCache(config, max_cache_len=CAPACITY).layers[0]
    layer.update(*states(3, 0))
    return layer


def is_copied(layer: Any, *given: torch.Tensor) -> bool:
    """Whether an update copies without positions."""
    with LaunchedOperations() as operations:
        layer.update(*given)
    return "aten::index_copy_" not in operations.names


def test_tokens_are_those_of_transformers(original: Update) -> None:
    ours, theirs = layer_of_a_model(), layer_of_a_model("sdpa")
    for step in range(CAPACITY - 3):
        new = states(1, step + 1)
        assert is_copied(ours, *new)
        original(theirs, *new)
        for found, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.equal(found, expected)
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == step + 4
    for layer in (ours, theirs):
        with pytest.raises(IndexError):
            layer.update(*states(1, 9))


def test_shown_are_the_tensors_of_the_layer() -> None:
    layer = layer_of_a_model()
    keys, values = layer.update(*states(1, 1))
    assert keys is layer.keys and values is layer.values


def test_layers_of_other_implementations_stay_as_they_are() -> None:
    assert not is_copied(layer_of_a_model("sdpa"), *states(1, 1))
    assert not is_copied(layer_of_a_model("eager"), *states(1, 1))


def _crop(layer: Any) -> Any:
    """As `crop` does, which transformers 5.17 has not."""
    layer.cumulative_length.sub_(1)
    return layer


def _replace_keys(layer: Any) -> Any:
    layer.keys = layer.keys.clone()
    return layer


def _replace_counter(layer: Any) -> Any:
    layer.cumulative_length = torch.tensor(1)
    return layer


def _replace_memory_of_counter(layer: Any) -> Any:
    layer.cumulative_length.data = torch.tensor(2)
    return layer


CHANGES: dict[str, Change] = {
    "replaced": _replace_keys,
    "another counter": _replace_counter,
    "other memory of the counter": _replace_memory_of_counter,
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "beams": lambda layer: layer.reorder_cache(torch.tensor([0])) or layer,
    "cropped": _crop,
    "reset": lambda layer: layer.reset() or layer,
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_were_changed(change: str, original: Update) -> None:
    """Between two tokens: a token is written where transformers writes it."""
    pair = [layer_of_a_model(), layer_of_a_model("sdpa")]
    for layer in pair:
        layer.update(*states(1, 1))
    ours, theirs = (CHANGES[change](layer) for layer in pair)
    ours.update(*states(1, 2))
    original(theirs, *states(1, 2))
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    assert int(ours.get_seq_length()) == int(theirs.get_seq_length())


def test_other_states_are_those_of_transformers() -> None:
    """Several tokens, another dtype, gradients."""
    layer = layer_of_a_model()
    assert is_copied(layer, *states(1, 1))
    assert not is_copied(layer, *(x.requires_grad_() for x in states(1, 2)))
    with pytest.raises(RuntimeError):
        layer_of_a_model().update(*states(1, 1, torch.float64))
    assert not is_copied(layer_of_a_model(), *states(2, 1))


def test_a_layer_ends_with_its_cache() -> None:
    layer = layer_of_a_model()
    layer.update(*states(1, 1))
    assert layer in static_rows._rows
    before = len(static_rows._rows)
    del layer
    assert len(static_rows._rows) == before - 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch whose cache has room for more tokens, full layers and windows."""
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    copied = []
    run = static_rows._Rows.append

    def counted(self: Any, *given: Any) -> bool:
        copied.append(run(self, *given))
        return copied[-1]

    monkeypatch.setattr(static_rows._Rows, "append", counted)
    model, batch = decoder(name), padded(prompts(9, 5), "left")
    expected = generated(model, "eager", batch, 8)
    found = generated(model, "attnlib", batch, 8, cache_implementation="static")
    assert torch.equal(found, expected) and copied and all(copied)
