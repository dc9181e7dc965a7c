"""The state of a cache for pickle: float8 as bytes, and pages instead of their views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnlib.cache.pages import page_views

__all__ = ["picklable_state", "restored_state"]

_VIEWS = ("key_cache", "value_cache")
_DERIVED = ("handle", "_signature", "_assigned")


def picklable_state(attributes: Mapping[str, Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    """What is pickled of a cache.

    Args:
        attributes: of the cache.
        sizes: N, Hkv, D and Dv.
    """
    state = {name: value for name, value in attributes.items() if name not in _DERIVED}
    if state["pages"] is not None:  # the views share its memory
        stored = (state["page_format"], *sizes, state["layout"])
        return {"pages": state["pages"], "stored": stored, "rotation": state["rotation"]}
    dtype = state["key_cache"].dtype
    if dtype.itemsize == 1:  # torch pickles float8 tensors, but cannot load them
        state["stored_dtype"] = dtype
        for name in _VIEWS:
            state[name] = state[name].view(torch.uint8)
    return state


def restored_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a cache from what was pickled."""
    state = dict(state)
    if (stored := state.pop("stored", None)) is not None:
        names = (*_VIEWS, "k_scale", "v_scale")
        views = page_views(state["pages"], *stored)
        state |= {**dict(zip(names, views, strict=True)), "layout": stored[-1]}
        state["page_format"] = stored[0]
    if (dtype := state.pop("stored_dtype", None)) is not None:
        for name in _VIEWS:
            state[name] = state[name].view(dtype)
    return state
