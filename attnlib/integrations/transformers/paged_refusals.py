"""Models that a `PagedModel` cannot serve."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnlib.errors import UnsupportedConfigError

__all__ = ["refuse_model", "shares_keys"]


def shares_keys(module: nn.Module) -> bool:
    """Whether an attention module declares that it has no keys of its own."""
    return bool(getattr(module, "is_kv_shared_layer", False))


_OUTSIDE_THE_CACHE = {
    **dict.fromkeys(
        ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"), "states"
    ),
    **dict.fromkeys(
        ("indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"), "index keys"
    ),
    **dict.fromkeys(
        ("compressed_sparse_attention", "heavily_compressed_attention"), "compressed entries"
    ),
}
"""Layer types of transformers, and what these layers keep that a paged KV cache does not hold."""


def refuse_model(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for kind in getattr(text, "layer_types", None) or ():
        if kind in _OUTSIDE_THE_CACHE:
            raise UnsupportedConfigError(
                f"{type(model).__name__} has layers of type {kind}, whose "
                f"{_OUTSIDE_THE_CACHE[kind]} are not in a paged KV cache: use generate with "
                "attn_implementation='attnlib'"
            )
    if getattr(text, "attn_temperature_tuning", False):
        raise UnsupportedConfigError(
            f"{type(model).__name__} scales queries by their index in the row "
            f"(attn_temperature_tuning), which is not their position in a packed row: set it to "
            f"False if the model allows it, or use generate with attn_implementation='attnlib'"
        )
