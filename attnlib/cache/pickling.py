"""The state of a cache for pickle: float8 as bytes, and pages instead of their views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnlib.cache.pages import page_views
from attnlib.kv_dtype import plain_format

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
        views = zip(_VIEWS, state["page_formats"], strict=True)
        formats = tuple(one or plain_format(state[name].dtype) for name, one in views)
        stored = (formats, *sizes, state["layout"])
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
        state["page_formats"] = tuple(one if one.scales_in_page else None for one in stored[0])
    if (dtype := state.pop("stored_dtype", None)) is not None:
        for name in _VIEWS:
            state[name] = state[name].view(dtype)
    return state
