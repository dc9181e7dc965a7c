"""Decodes of windowed layers in `generate_batch`, by block tables of their rings of pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import PagedAttentionCache, cache

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import continuous
from attnlib.integrations.transformers.ring_allocator import without_slot_column
from tests.integrations.tiny_models import decoder, prompts
from tests.integrations.transformers.test_continuous import PAGE, batch_tokens, eager_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(cache, "ATTN_TYPE_TO_ALLOCATOR"), reason="this version has no allocators"
    ),
]


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """(whether the step has a block table, whether keys are gathered) of each attention call."""
    calls: list[tuple[bool, bool]] = []
    attend, update = continuous.attend_continuous, continuous.sliding_update

    def noted(call: Any, paged: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        calls.append((kwargs.get("block_table") is not None, False))
        return attend(call, paged, kwargs)

    def gathered(paged: Any, call: Any, kwargs: dict[str, Any]) -> Any:
        calls[-1] = calls[-1][0], True
        return update(paged, call, kwargs)

    monkeypatch.setattr("attnlib.integrations.transformers.attention.attend_continuous", noted)
    monkeypatch.setattr(continuous, "sliding_update", gathered)
    return calls


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_decodes_gather_no_keys(name: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts below and above the window of 5, in pages below and above it; the ring wraps."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    model, inputs = decoder(name), prompts(3, 9, 18)
    calls = calls_of(monkeypatch)
    found = batch_tokens(model, inputs, 12, **{PAGE: page})
    assert found == eager_tokens(model, inputs, 12)
    by_table = [gathers for has_table, gathers in calls if has_table]
    assert len(by_table) > 10 and not any(by_table)


def test_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    model, inputs = decoder("gemma3"), prompts(3, 11)
    assert batch_tokens(model, inputs, 4, **{PAGE: 4}) == eager_tokens(model, inputs, 4)


def test_other_implementations_have_the_allocators_of_transformers() -> None:
    """Their kernels know no ring."""
    allocators, made = cache.ATTN_TYPE_TO_ALLOCATOR["sliding_attention"], {}
    for name in ("sdpa", "attnlib"):
        config = decoder("mistral").config
        config._attn_implementation = name
        settings: dict[str, Any] = {"num_key_value_heads": 2, "cache_dtype": torch.float32}
        settings |= {"config": config, "page_size": 8, "layer_indices": [0, 1], "index": 0}
        made[name] = allocators(**settings, allow_block_sharing=True)
    assert not made["sdpa"].supports_block_table and made["attnlib"].supports_block_table
    assert not allocators.supports_block_table


def test_the_last_column_is_left_to_the_slots() -> None:
    """A request that would fill all columns is no decode of the fast path."""
    ring = type("RingAllocator", (), {"tokens_per_page": 8})()
    full = SimpleNamespace(tokens_per_page=8)
    for allocators, expected in (({"a": full}, 80), ({"a": full, "b": ring}, 72)):
        paged = SimpleNamespace(cache_allocators=allocators)
        assert without_slot_column(lambda self: 80)(paged) == expected
    assert without_slot_column(lambda self: 0)(SimpleNamespace(cache_allocators={"b": ring})) == 0
    assert PagedAttentionCache._infer_max_decode_fast_path_length.__name__ == "longest_decode"


def test_a_smaller_window_than_the_ring_is_refused() -> None:
    """The order of the keys in a ring is not known."""
    call: Any = SimpleNamespace(sliding_window=3, module=torch.nn.Identity())
    storage: Any = SimpleNamespace(window=5)
    with pytest.raises(UnsupportedConfigError, match="max_blocks_per_request=0"):
        continuous._check_ring(call, storage)
