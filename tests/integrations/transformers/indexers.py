"""How many keys the indexers of a model of transformers select."""

from __future__ import annotations

from typing import Any

__all__ = ["select_all_keys", "select_few_keys"]

_LIMITS: tuple[dict[str, int], ...] = (
    {"index_topk": 64},
    {"topk_blocks": 64},
    {"token_budget": 128, "block_topk": 64},
)
"""Attributes of an indexer, with values above the number of tokens of a test."""


def select_few_keys(model: Any) -> None:
    """Make indexers that select tokens keep 5 of them. Others are small by their configuration."""
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 5


def select_all_keys(model: Any) -> int:
    """Make all indexers keep every visible key; the number of indexers."""
    count = 0
    for module in model.modules():
        for limits in _LIMITS:
            if all(isinstance(getattr(module, name, None), int) for name in limits):
                vars(module).update(limits)
                count += 1
    return count
