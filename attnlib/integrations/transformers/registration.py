"""Register the name `attnlib` with transformers, and unregister it.

Public registries take the functions of attention, masks and experts. What has no public hook is
replaced: how caches take tokens and where a static cache is (`cache_seams`), parts of continuous
batching (`continuous_seams`), and the search for sequences in a row (`one_row`). `unregister`
restores everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.integrations.transformers.experts import compute_experts
from attnlib.integrations.transformers.masks import attnlib_mask
from attnlib.integrations.transformers.static_memory import forget_static_memory

__all__ = ["NAME", "register", "unregister"]

NAME = "attnlib"
_PAGED = f"paged|{NAME}"
"""The name that continuous batching uses up to transformers 5.17."""
_NAMES = (NAME, _PAGED)

_replaced: list[tuple[Any, str, Any]] = []
"""(module, class or dict, attribute or key, original) of everything that was replaced."""


def register() -> None:
    """Register `attn_implementation="attnlib"` with transformers. Repeated calls change nothing.

    Models then run by name: `from_pretrained(..., attn_implementation="attnlib")` or
    `model.set_attn_implementation("attnlib")`, in forwards, `generate` and `generate_batch`.
    attnlib selects a backend for each layer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, compute_experts)
    AttentionInterface.register(NAME, attnlib_attention)
    AttentionMaskInterface.register(NAME, attnlib_mask)
    if "paged|sdpa" in AttentionInterface._global_mapping:
        AttentionInterface.register(_PAGED, attnlib_attention)
    if not _replaced:
        _patch()


def unregister() -> None:
    """Undo `register`. A model that still uses the name fails at its next forward."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface._global_mapping.pop(NAME, None)
    for name in _NAMES:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    while _replaced:
        owner, name, original = _replaced.pop()
        _set(owner, name, original)
    forget_static_memory()


def _patch() -> None:
    """Replace what has no public hook."""
    from transformers import masking_utils

    from attnlib.integrations.transformers.cache_seams import cache_seams
    from attnlib.integrations.transformers.continuous_seams import seams
    from attnlib.integrations.transformers.paged_calls import one_row

    for owner, name, make in (*cache_seams(), *seams()):
        _replace(owner, name, make)
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        _replace(masking_utils, "find_packed_sequence_indices", one_row)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    _replaced.append((owner, name, original))
    _set(owner, name, make(original))


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
