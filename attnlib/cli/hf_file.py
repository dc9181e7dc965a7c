"""The `config.json` of a Hugging Face model, whose values have the right types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnlib.errors import ContractError

__all__ = ["read_config"]

_TYPES: dict[Any, tuple[str, ...]] = {
    int: (
        "num_attention_heads", "n_head", "n_heads", "hidden_size", "n_embd", "d_model", "dim",
        "num_key_value_heads", "num_kv_heads", "head_dim", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "local_attention", "sliding_window", "index_topk",
        "index_topk_blocks", "index_block_size", "attention_chunk_size", "max_window_layers",
        "num_hidden_layers", "no_rope_layer_interval", "global_attn_every_n_layers",
    ),
    (int, str): ("sliding_window_pattern",),
    (int, float): ("attn_logit_softcapping",),
    list: ("layer_types",),
    dict: ("attn_config", "compress_rates"),
}  # fmt: skip
"""Types of the keys that are read, where they are given."""


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file, and the config of the text model in it.

    Args:
        path: a `config.json`, or the directory that contains it.

    Raises:
        ContractError: there is no file, it is not JSON, or a value has another type.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ContractError(
            f"no config file at {file}: give a config.json or the directory that contains it"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{file} is not valid JSON: {error}") from error
    found = config.get("text_config") or config if isinstance(config, dict) else config
    if not isinstance(found, dict):
        raise ContractError(
            f"{file} holds a {type(found).__name__}: it must be the config of a model, an object "
            "with keys such as num_attention_heads"
        )
    for kind, names in _TYPES.items():
        for name in names:
            value = found.get(name)
            if value is not None and (not isinstance(value, kind) or value is True):
                raise ContractError(
                    f"{file} has {name}={value!r}, which must be of type "
                    f"{getattr(kind, '__name__', 'number')}"
                )
    return file, found
