"""Masks that come as tensors: their values become kernel arguments, and nothing is guessed."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

from attnlib.integrations.transformers.mask_values import step_of_values, visible_keys
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.spec import Window
from tests.integrations.tiny_models import decoder, padded, prompts, run


def states(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch, 4, queries, 8), torch.zeros(batch, 2, keys, 8)


def mask_of(
    offset: int, queries: int, keys: int, padding: list[int], window: int | None = None
) -> torch.Tensor:
    """A causal mask `[B, 1, T, S]`, with so many padding keys at the left of each row."""
    rows, columns = torch.arange(queries)[:, None] + offset, torch.arange(keys)
    visible = columns <= rows
    if window is not None:
        visible = visible & (columns > rows - window)
    return torch.stack([visible & (columns >= left) for left in padding])[:, None]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize(
    ("offset", "queries", "keys"),
    [(0, 6, 6), (4, 2, 6), (0, 4, 9), (3, 4, 9), (0, 1, 5), (5, 1, 9)],
)
def test_causal_masks(
    offset: int, queries: int, keys: int, as_float: bool, window: int | None
) -> None:
    """Of a prefill, a chunk of one, and of a static cache whose last keys are not written."""
    visible = mask_of(offset, queries, keys, [0, 0], window)
    mask = visible
    if as_float:
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    step = step_of_values(mask, *states(2, queries, keys), window)
    assert isinstance(step, StepMask) and step.pattern is not None
    assert step.pattern.causal and step.width == offset + queries
    assert torch.equal(step.dense(), visible)
    if queries > 1 and window is not None and window < step.width:
        assert step.pattern.window == Window(window - 1, 0)
    described = StepMask(
        step.pattern,
        *(2, queries, keys, step.q_offset),
        attention_mask=step.attention_mask,
    )
    assert torch.equal(described.dense().expand_as(visible), visible)


def test_padding_is_found() -> None:
    step = step_of_values(mask_of(0, 6, 6, [0, 2]), *states(2, 6, 6), None)
    assert step is not None and step.attention_mask is not None
    assert step.attention_mask.sum(1).tolist() == [6, 4]


def test_bidirectional_masks() -> None:
    keys = torch.ones(2, 6, dtype=torch.bool)
    keys[1, 4:] = False
    step = step_of_values(keys[:, None, None].expand(2, 1, 3, 6), *states(2, 3, 6), None)
    assert step is not None and step.pattern == Pattern(False)
    assert step.attention_mask is not None and torch.equal(step.attention_mask, keys)


@pytest.mark.parametrize("changed", [(0, 0, 3, 1), (1, 0, 5, 2), (1, 0, 0, 4)])
def test_one_other_value_is_another_mask(changed: tuple[int, ...]) -> None:
    mask = mask_of(0, 6, 6, [0, 0])
    mask[changed] = ~mask[changed]
    assert step_of_values(mask, *states(2, 6, 6), None) is None


def test_added_numbers_are_no_mask() -> None:
    mask = torch.zeros(1, 1, 4, 4)
    mask[0, 0, 2, 1] = -0.5
    assert step_of_values(mask, *states(1, 4, 4), None) is None


def test_another_window_than_that_of_the_layer_is_another_mask() -> None:
    mask = mask_of(0, 6, 6, [0], window=3)
    assert step_of_values(mask, *states(1, 6, 6), 4) is None
    assert step_of_values(mask, *states(1, 6, 6), None) is None


def test_a_mask_that_is_written_is_read_again() -> None:
    mask, tensors = mask_of(0, 6, 6, [0]), states(1, 6, 6)
    first = step_of_values(mask, *tensors, None)
    assert first is not None and step_of_values(mask, *tensors, None) is first
    mask[..., 0] = False
    second = step_of_values(mask, *tensors, None)
    assert second is not None and second.attention_mask is not None
    with torch.inference_mode():  # such tensors do not count writes
        uncounted = mask.clone()
        read = step_of_values(uncounted, *tensors, None)
        uncounted[..., 1] = False
        again = step_of_values(uncounted, *tensors, None)
    assert read is not None and again is not None and again.attention_mask is not None
    assert again.attention_mask.sum() == 4


@pytest.mark.parametrize("shape", [(1, 4, 1, 6), (1, 1, 2, 6), (1, 1, 1, 3), (1, 1, 1, 8)])
def test_visible_keys_of_other_masks(shape: tuple[int, ...]) -> None:
    """A mask per head, of several queries, or of fewer or more keys."""
    assert visible_keys(torch.ones(shape, dtype=torch.bool), 6) is None
    assert visible_keys(torch.ones(1, 1, 1, 6), 6) is None
    assert visible_keys(torch.ones(2, 1, 1, 6, dtype=torch.bool), 6).shape == (2, 6)


def test_a_mask_of_the_user_is_served_by_the_backend_of_the_layer(monkeypatch: Any) -> None:
    """A 4-D mask with the values of causality and padding, in a model."""
    from attnlib.integrations.transformers import plain

    model, batch = decoder("mistral"), padded(prompts(9, 5), "left")
    real = batch["attention_mask"].bool()
    mask = mask_of(0, 9, 9, [0, 4], window=model.config.sliding_window)
    floats = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def call(m: Any) -> torch.Tensor:
        given = {"input_ids": batch["input_ids"], "position_ids": positions}
        return m(**given, attention_mask=floats, use_cache=False).logits

    expected = run(model, "eager", call)
    monkeypatch.setattr(plain, "attend_dense", None)
    found = run(model, "attnlib", call)
    assert float((found - expected)[real].abs().max()) < 2e-5


def test_the_description_of_values_does_not_keep_them() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    assert step_of_values(mask, *states(1, 4, 4), None) is not None
    alive = ref(mask)
    del mask
    assert alive() is None
