"""The extra arguments of vLLM's layer, for a layer of attnlib."""

from __future__ import annotations

import dataclasses
from typing import Any

from attnlib.spec import AttentionSpec

__all__ = ["LAYER_ARGUMENTS", "layer_arguments"]

LAYER_ARGUMENTS = {field.name for field in dataclasses.fields(AttentionSpec)} | {"sinks", "device"}
"""Names that `attnlib.Attention.from_arguments` takes."""
_LATENT_SIZES = (
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
)
"""Sizes of multi-head latent attention that vLLM passes, but attention itself does not need."""


def layer_arguments(extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Attention.from_arguments` for vLLM's extra arguments.

    Raises:
        TypeError: one that attnlib does not have.
    """
    extra = dict(extra)
    sizes = {name: extra.pop(name) for name in _LATENT_SIZES if name in extra}
    latent = extra.pop("kv_lora_rank", None)
    if latent is not None:
        extra["head_size_v"] = latent
    elif sizes:
        raise TypeError(f"{', '.join(sizes)} need kv_lora_rank, the size of the latent values")
    unknown = [name for name in extra if name not in LAYER_ARGUMENTS]
    if unknown:
        raise TypeError(
            f"Attention got unexpected arguments {', '.join(unknown)}; extra arguments are sinks, "
            f"kv_lora_rank, {', '.join(_LATENT_SIZES)}, device and the fields of AttentionSpec"
        )
    return extra
