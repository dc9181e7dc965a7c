"""The kinds of layers in a Hugging Face config, also where it has no `layer_types`.

Published configs leave them to the classes of transformers, whose rules are repeated here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["has_states", "layer_kinds"]

_STATES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
"""Layer types without keys and values that hold a state."""
_WITHOUT_KEYS = (*_STATES, "mlp", "moe")
_SIZES_OF_STATES = (
    *("linear_num_value_heads", "linear_attn_config", "mamba_num_heads", "mamba_d_state"),
    *("ssm_state_size", "conv_L_cache", "lru_width"),
)
"""Keys of models with state layers."""
_PERIODS = {
    **dict.fromkeys(("gemma2", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "exaone4", "llama4", "llama4_text", "olmo3"), 4),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), 5),
    **dict.fromkeys(("gemma3", "gemma3_text"), 6),
    "modernbert": 3,
}
"""Model type -> layers of which one sees all keys, where the config does not say it."""


def layer_kinds(config: dict[str, Any], window: int | None) -> tuple[list[str], list[str]]:
    """(kinds of layers with keys, other kinds), each in the order of the first layers.

    Args:
        config: of the text model.
        window: its sliding window, None for none.
    """
    listed = dict.fromkeys(config.get("layer_types") or _unlisted(config, window))
    others = [kind for kind in listed if kind in _WITHOUT_KEYS]
    return [kind for kind in listed if kind not in others], others


def has_states(config: dict[str, Any]) -> bool:
    """Whether some layers hold a recurrent state."""
    listed = config.get("layer_types") or ()
    return any(kind in _STATES for kind in listed) or any(map(config.get, _SIZES_OF_STATES))


def _unlisted(config: dict[str, Any], window: int | None) -> list[str]:
    """The kinds of a model whose config does not list them."""
    model = str(config.get("model_type", ""))
    if model.startswith("llama4") and config.get("attention_chunk_size"):
        return _some("chunked_attention", config.get("no_rope_layer_interval") or _PERIODS[model])
    if window is None:
        return ["full_attention"]
    period: Any = config.get("sliding_window_pattern")
    if isinstance(period, str):  # such as LLLG
        period = len(period)
    period = period or config.get("global_attn_every_n_layers") or _PERIODS.get(model)
    if period:
        return _some("sliding_attention", period)
    first, count = config.get("max_window_layers"), config.get("num_hidden_layers")
    if first is None or count is None:
        return ["sliding_attention"]
    return ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < count)


def _some(kind: str, period: int) -> list[str]:
    """The kinds where one of `period` layers sees all keys, and the others are of a kind."""
    return ["full_attention"] if period == 1 else [kind, "full_attention"]
