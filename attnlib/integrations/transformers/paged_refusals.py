"""Models that a `PagedModel` cannot serve."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.registration import NAME

__all__ = ["check_model", "refuse_model", "shares_keys", "unreached_layers"]


def check_model(model: object) -> None:
    """Check that a model is a module, and not its name or its config.

    Raises:
        ContractError: an object of another type.
    """
    if not isinstance(model, nn.Module):
        raise ContractError(
            f"model is a {type(model).__name__}; PagedModel takes a loaded model: "
            "AutoModelForCausalLM.from_pretrained(NAME).eval()"
        )


def shares_keys(module: nn.Module) -> bool:
    """Whether an attention module declares that it has no keys of its own."""
    return bool(getattr(module, "is_kv_shared_layer", False))


_STATES = "states"
_OUTSIDE_THE_CACHE = {
    **dict.fromkeys(
        ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"), _STATES
    ),
    **dict.fromkeys(
        ("indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"), "index keys"
    ),
    **dict.fromkeys(
        ("compressed_sparse_attention", "heavily_compressed_attention"), "compressed entries"
    ),
}
"""Layer types of transformers, and what these layers keep that a paged KV cache does not hold."""


def refuse_model(model: nn.Module, *, serves_states: bool = False) -> None:
    """Refuse a model that keeps what a step has no place for.

    Args:
        model: the model.
        serves_states: its recurrent states are in slots (`StateMixers`).

    Raises:
        UnsupportedConfigError: names the layers, and what they keep.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for kind in getattr(text, "layer_types", None) or ():
        held = _OUTSIDE_THE_CACHE.get(kind)
        if held is not None and not (serves_states and held == _STATES):
            raise UnsupportedConfigError(
                f"{type(model).__name__} has layers of type {kind}, whose "
                f"{held} are not in a paged KV cache: use generate with "
                "attn_implementation='attnlib'"
            )
    if getattr(text, "attn_temperature_tuning", False):
        raise UnsupportedConfigError(
            f"{type(model).__name__} scales queries by their index in the row "
            f"(attn_temperature_tuning), which is not their position in a packed row: set it to "
            f"False if the model allows it, or use generate with attn_implementation='attnlib'"
        )


def unreached_layers(model: Any, reached: int, known: int) -> UnsupportedConfigError:
    """The error of a step that did not reach every layer that a model is known to have."""
    action = f"use generate with attn_implementation={NAME!r}"
    if model.config._attn_implementation != NAME:
        action = "call step within `with paged.attached():`"
    return UnsupportedConfigError(
        f"{type(model).__name__}: the step reached {reached} of {known or 'its'} attention and "
        f"state layers, so the logits would be wrong: {action}"
    )
