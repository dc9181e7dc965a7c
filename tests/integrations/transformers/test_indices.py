"""The read and write indices of transformers, converted by `attnlib.cache.indices`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache import indices as convert
from attnlib.integrations.transformers import continuous
from tests.integrations.tiny_models import decoder, prompts
from tests.integrations.transformers.test_continuous import batch_tokens, pytestmark

__all__ = ["pytestmark"]  # as there: slow, and only where transformers finds memory on a CPU


def test_converted_indices_place_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the slots that the integration computes, at every step of `generate_batch`."""
    placement, read_before = continuous.placement, []

    def checked(storage: Any, lengths: torch.Tensor, kwargs: Any, num_tokens: int) -> Any:
        table, slots, longest = placement(storage, lengths, kwargs, num_tokens)
        if kwargs.get("block_table") is not None:
            return table, slots, longest
        size, starts = storage.pages.block_size, kwargs["cu_seq_lens_q"]
        read, write = kwargs["read_index"][storage.group], kwargs["write_index"][storage.group]
        new = read.numel() == 0  # then all requests are new, and read what they write
        read_before.append(not new)
        token_slots = convert.read_indices_to_token_slots(
            write if new else read,
            starts if new else storage.key_starts(kwargs),
            longest,
        )
        found = convert.token_slots_to_block_table(token_slots, lengths, size)
        needed = torch.arange(found.shape[1]) * size < lengths[:, None]
        assert torch.equal(found[needed], table[:, : found.shape[1]][needed])
        written = convert.token_slots_to_write_indices(token_slots, starts, lengths, write.numel())
        assert torch.equal(written, slots)
        back = convert.token_slots_to_read_indices(token_slots, lengths)
        total = int(lengths.sum())
        assert torch.equal(back.indices[:total], (write if new else read)[:total].long())
        return table, slots, longest

    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    monkeypatch.setattr(continuous, "placement", checked)
    batch_tokens(decoder("llama"), prompts(5, 9, 33, 18), 6)
    assert any(read_before)
