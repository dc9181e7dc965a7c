"""Specs from a Hugging Face `config.json`: one for each kind of layer that the model has. Reads the file as JSON; transformers is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["specs_from_config"]

_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "mpnet", "modernbert", "camembert")
_SINKS = ("gpt_oss",)


def specs_from_config(path: str | Path, **overrides: Any) -> dict[str, AttentionSpec]:
    """Layer kind ("full_attention", "sliding_attention", "chunked_attention") -> its spec.

    Args:
        path: a `config.json`, or the folder that holds one.
        overrides: fields of `AttentionSpec` that win over the file.

    Raises:
        ContractError: the file is missing or says too little; the message names the field.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ContractError(f"no config file at {file}: give a config.json or the folder that holds one")
    config = json.loads(file.read_text())
    config = config.get("text_config") or config
    common = {**_common_fields(config, file), **overrides}
    window, chunk = _window(config), config.get("attention_chunk_size")
    kinds = list(dict.fromkeys(config.get("layer_types") or [])) or (["sliding_attention"] if window else ["full_attention"])
    specs = {}
    for kind in kinds:
        narrowed: dict[str, Any] = {}
        if kind == "sliding_attention":
            narrowed = {"sliding_window": window}
        elif kind == "chunked_attention":
            narrowed = {"attention_chunk_size": chunk}
        specs[kind] = AttentionSpec(**{**common, **narrowed, **overrides})
    return specs


def _common_fields(config: dict[str, Any], file: Path) -> dict[str, Any]:
    heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if not heads or not (config.get("head_dim") or hidden):
        raise ContractError(f"{file} has no num_attention_heads with hidden_size or head_dim: is it the config of a transformer?")
    model = str(config.get("model_type", ""))
    return {
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": config.get("head_dim") or hidden // heads,
        "dtype": getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")),
        "logits_soft_cap": config.get("attn_logit_softcapping"),
        "has_sink": model in _SINKS,
        "attn_type": AttentionType.ENCODER_ONLY if model in _ENCODERS else AttentionType.DECODER,
    }


def _window(config: dict[str, Any]) -> int | None:
    return None if config.get("use_sliding_window") is False else config.get("sliding_window")
