"""Whether the caller of a model wants attention weights.

Most models pass `output_attentions` down to the attention. Some (GPT-2) do not: transformers
records the second output of each attention module by hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["weights_are_collected", "weights_are_recorded", "weights_are_recorded_in_trace"]


_collector: Any = None
"""Private to transformers: what the hooks of this forward collect. Models that collect outputs have
imported its module."""


def weights_are_recorded(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of the attention function has to return weights.

    Args:
        kwargs: of the call.
    """
    return bool(kwargs.get("output_attentions")) or weights_are_collected()


def weights_are_collected() -> bool:
    """Whether hooks of this forward collect weights."""
    global _collector
    if _collector is None:
        module = sys.modules.get("transformers.utils.output_capturing")
        _collector = getattr(module, "_active_collector", None)
        if _collector is None:
            return False
    collected: Any = _collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def weights_are_recorded_in_trace() -> bool:
    """Whether the hooks of a forward that torch.compile traces collect weights.

    transformers keeps what they collect in a global variable then, because a context variable
    cannot be traced.
    """
    from transformers.utils.output_capturing import _active_collector

    if not _active_collector.compiling:
        return False
    collected = _active_collector.global_var
    return collected is not None and any("attentions" in name for name in collected)
