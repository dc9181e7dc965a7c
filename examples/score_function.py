"""A score function: `attnlib verify torch --score examples/score_function.py:recent_first`."""

from __future__ import annotations

from typing import Any

from attnlib.score_functions import minimum


def recent_first(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """A penalty that grows with the distance of the key, up to 512 tokens."""
    return score - 0.01 * minimum(q_pos - k_pos, 512)
