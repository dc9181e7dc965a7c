"""The functions of caches of transformers that attnlib replaces, because they have no public hook.

Where the installed version has other ones, caches stay as they are: tokens are concatenated, and a
CUDA graph is recorded again for each static cache.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from transformers import cache_utils

from attnlib.integrations.transformers.continuous_seams import KNOWN_VERSIONS
from attnlib.integrations.transformers.growing_cache import growing_update
from attnlib.integrations.transformers.static_memory import in_kept_memory, of_model
from attnlib.integrations.transformers.static_rows import copied_tokens

__all__ = ["cache_seams"]

logger = logging.getLogger("attnlib")

_STATES = ("self", "key_states", "value_states")
_SEAMS: tuple[tuple[str, str, tuple[str, ...], Callable[[Any], Any]], ...] = (
    ("DynamicLayer", "update", _STATES, growing_update),
    ("DynamicSlidingWindowLayer", "update", _STATES, growing_update),
    ("StaticCache", "__init__", ("self", "config"), of_model),
    ("StaticLayer", "lazy_initialization", _STATES, in_kept_memory),
    ("StaticLayer", "update", _STATES, copied_tokens),
    ("LinearAttentionLayer", "lazy_initialization", ("self", "conv_states"), in_kept_memory),
)


def cache_seams() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(class, attribute, replacement of the original) of what is replaced. A warning names what the
    installed version lacks, and the versions that are known."""
    for class_name, name, parameters, make in _SEAMS:
        owner = getattr(cache_utils, class_name, None)
        original = getattr(owner, name, None)
        found = () if original is None else tuple(inspect.signature(original).parameters)
        if found[: len(parameters)] == parameters:
            yield owner, name, make
            continue
        logger.warning(
            "transformers %s: %s.%s(%s) is another function or is missing, so attnlib, which knows "
            "transformers %s, leaves these caches as they are: generate is right, but slower",
            *(transformers.__version__, class_name, name, ", ".join(parameters), KNOWN_VERSIONS),
        )
