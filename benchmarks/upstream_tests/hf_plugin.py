"""pytest plug-in: transformers computes "sdpa" by attnlib, or by attnlib with half of the output.

ATTNLIB_RUNS is `sdpa` (nothing is replaced), `attnlib` or `halved`. Tests keep the name that they
ask for, and default implementations are replaced, too.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

__all__: list[str] = []


def _halved(attention: Any) -> Any:
    def half(*args: Any, **kwargs: Any) -> Any:
        out, weights = attention(*args, **kwargs)
        return out * 0.5, weights

    return half


def _replace(halve: bool) -> None:
    import attnlib.integrations.transformers as integration

    integration.register()
    mapping = AttentionInterface._global_mapping
    attention = mapping["attnlib"]
    mapping["sdpa"] = _halved(attention) if halve else attention
    masks = AttentionMaskInterface._global_mapping
    masks["sdpa"] = masks["attnlib"]


if os.environ.get("ATTNLIB_RUNS", "sdpa") != "sdpa":
    _replace(os.environ["ATTNLIB_RUNS"] == "halved")
