"""Masks of decodes: the values of transformers in few operations."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from attnlib.integrations.transformers import single_query
from attnlib.integrations.transformers.patterns import Pattern, recognize
from attnlib.integrations.transformers.single_query import counted_mask, single_query_mask
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.spec import Window
from tests.integrations.transformers.launched_operations import LaunchedOperations


@pytest.mark.parametrize("padded_keys", [0, 3])
@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("offset", [0, 5, 11])
def test_the_mask_of_a_single_query(offset: int, window: int | None, padded_keys: int) -> None:
    """As transformers evaluates it, also where the padding is shorter than the cache."""
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    padding = None
    if padded_keys:
        padding = torch.ones(2, offset + 1, dtype=torch.bool)
        padding[0, :padded_keys] = False
    left = None if window is None else window - 1
    step = StepMask(Pattern(True, Window(left, 0)), 2, 1, 12, offset, 0, function, padding)
    mask = single_query_mask(step)
    assert mask is not None and torch.equal(mask, step.dense())


@pytest.mark.parametrize("padding", ["none", "as long", "shorter", "longer"])
@pytest.mark.parametrize("begin", [0, 7])
@pytest.mark.parametrize("window", [None, 4, 12, 40])
@pytest.mark.parametrize("position", [0, 5, 11])
def test_the_mask_of_a_query_whose_position_is_on_the_device(
    position: int, window: int | None, begin: int, padding: str
) -> None:
    """As transformers evaluates it. A compiled decode waits for its launches: they are few."""
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    keep = None
    if padding != "none":
        tokens = {"as long": 12, "shorter": position + 1, "longer": 15}[padding] + begin
        keep = torch.ones(2, tokens, dtype=torch.bool)
        keep[0, : begin + 3] = False
        keep[1, begin : begin + 1] = False
    places = {"q_offset": torch.tensor(position + begin), "kv_offset": begin, "device": "cpu"}
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 12, "allow_is_causal_skip": False}
    given = {**places, **sizes, "mask_function": function, "attention_mask": keep}
    pattern = recognize(function)
    counted_mask(pattern, given)  # keeps the columns
    with LaunchedOperations() as operations:
        found = counted_mask(pattern, given)
    assert found is not None and torch.equal(found, masking_utils.sdpa_mask(**given))
    most = 1 + (begin > 0) + (keep is not None) + (padding == "shorter" and position < 11)
    assert len(operations.names) == most + (3 if window == 4 else 0), operations.names


def test_columns_of_a_recorded_mask_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would read the memory of kept columns after other sizes have replaced them."""
    sizes = 2, 13, torch.device("cpu")
    kept = single_query._columns(*sizes)
    assert single_query._columns(*sizes) is kept
    monkeypatch.setattr(single_query, "is_capturing", lambda device: True)
    recorded = single_query._columns(*sizes)
    assert recorded is not kept and torch.equal(recorded, kept)
    monkeypatch.undo()
    assert single_query._columns(*sizes) is kept


def test_masks_that_are_more_than_causality_are_evaluated() -> None:
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    both = masking_utils.bidirectional_mask_function
    for function in (chunks, both, lambda *_: True):
        assert counted_mask(recognize(function), {}) is None
