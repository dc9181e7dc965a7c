"""Specs from a Hugging Face `config.json`: one per kind of layer. Does not need transformers.

Model families use different keys for the same property: names of sizes, ALiBi, multi-query
attention, heads in two parts (MLA as transformers computes it), and widths of windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attnlib.cli.hf_file import read_config
from attnlib.cli.layer_kinds import layer_kinds
from attnlib.errors import ContractError
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection, SelectionScope
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["fallback_lines", "specs_from_config"]

_ENCODERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "electra",
    "deberta",
    "mpnet",
    "modernbert",
    "camembert",
)
_SINKS = ("gpt_oss", "deepseek_v4")
_KEYS_ARE_VALUES = ("deepseek_v4",)
_ALIBI = ("bloom",)
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Layer types of DeepSeek V4 with compressed entries."""


def specs_from_config(path: str | Path, **overrides: Any) -> dict[str, AttentionSpec]:
    """Layer kind ("full_attention", "sliding_attention", "indexed_attention", ...) -> its spec.

    Args:
        path: a `config.json`, or the directory that contains it.
        overrides: fields of `AttentionSpec` that override the file.

    Returns:
        Kind of layer -> spec. Models with multi-head latent attention have two for each kind: with
        keys and values of every head, as `generate` attends to them, and "... over latents". Layers
        whose indexer selects keys have the form of its lists.

    Raises:
        ContractError: the file or a required key is missing or invalid; the message names it.
    """
    file, config = read_config(path)
    if "dtype" in overrides:  # an unknown dtype in the file does not matter then
        config = {**config, "dtype": str(overrides["dtype"])}
    common = _common_fields(config, file, overrides)
    window = _window(config)
    kinds, others = layer_kinds(config, window)
    if not kinds:
        raise ContractError(
            f"{file} has no attention layers: its layer_types are {', '.join(others)}"
        )
    specs = {
        kind: AttentionSpec(
            **{**common, **_fields_of_kind(kind, window, config, file, overrides), **overrides}
        )
        for kind in kinds
    }
    latent = {} if "head_size" in overrides else _latent_fields(config)
    over_latents = {f"{kind} over latents": s.replace(**latent) for kind, s in specs.items()}
    return specs | over_latents if latent else specs


def fallback_lines(spec: AttentionSpec) -> list[str]:
    """The calls of a layer that `integrations.transformers` computes with torch, whichever backend
    is selected: lines for `attnlib explain`."""
    if spec.attention_chunk_size is None:
        return []
    return [
        "in transformers, several queries of this layer after its cache has dropped keys "
        f"(positions past the first chunk of {spec.attention_chunk_size}) are computed by torch, "
        "with a warning; a backend that is required by name refuses them. Single queries and "
        "PagedModel use the selected backend."
    ]


def _fields_of_kind(
    kind: str, window: int | None, config: dict[str, Any], file: Path, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Fields that a kind of layer has in addition to the common ones."""
    if kind == "sliding_attention":
        if (
            window is None
            and config.get("use_sliding_window") is not False
            and not {"sliding_window", "window"} & overrides.keys()
        ):
            raise ContractError(
                f"{file} has sliding_attention layers and no sliding_window: give --sliding-window"
            )
        return {"sliding_window": window}
    if kind == "chunked_attention":
        return {"attention_chunk_size": config.get("attention_chunk_size")}
    if kind in _COMPRESSED:
        return {"sliding_window": window, "compressed_entries": _entries(kind, config, file)}
    return {"key_selection": _key_selection(kind, config)}


def _key_selection(kind: str, config: dict[str, Any]) -> KeySelection | None:
    """The lists of a layer whose indexer selects keys (M11); None for other layers."""
    tokens = config.get("index_topk")
    if kind == "indexed_attention" and tokens:
        return KeySelection(max_blocks=tokens)
    blocks, size = config.get("index_topk_blocks"), config.get("index_block_size")
    if kind == "minimax_m3_sparse" and blocks and size:
        return KeySelection(max_blocks=blocks, block_size=size, scope=SelectionScope.KV_HEAD)
    return None


def _entries(kind: str, config: dict[str, Any], file: Path) -> CompressedEntries:
    """The second key stream of DeepSeek V4 (M17)."""
    rate = (config.get("compress_rates") or {}).get(kind)
    if not rate:
        raise ContractError(f"{file} has {kind} layers and no compress_rates for them")
    selects = kind == "compressed_sparse_attention" and config.get("index_topk")
    selection = KeySelection(max_blocks=config["index_topk"]) if selects else None
    return CompressedEntries(compress_rate=rate, selection=selection)


def _common_fields(config: dict[str, Any], file: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    heads = overrides.get("num_heads") or _first(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model", "dim")
    if not heads or not (overrides.get("head_size") or config.get("head_dim") or hidden):
        raise ContractError(
            f"{file} has no num_attention_heads with hidden_size or head_dim: it must be "
            f"the config of a transformer; where it leaves them to its class, give --num-heads, "
            "--num-kv-heads and --head-size"
        )
    model = str(config.get("model_type", ""))
    return {
        "num_heads": heads,
        "num_kv_heads": _num_kv_heads(config, heads),
        **_head_sizes(config, hidden, heads),
        "dtype": _dtype(config, file),
        "logits_soft_cap": config.get("attn_logit_softcapping"),
        "has_alibi": model in _ALIBI
        or bool(config.get("alibi"))
        or bool((config.get("attn_config") or {}).get("alibi")),
        "has_sink": model in _SINKS,
        "use_mla": model in _KEYS_ARE_VALUES,
        "attn_type": AttentionType.ENCODER_ONLY if _is_encoder(config) else AttentionType.DECODER,
    }


def _is_encoder(config: dict[str, Any]) -> bool:
    """Whether it is a model of texts that is an encoder, or one of images (ViT)."""
    of_patches = bool(config.get("patch_size")) and not config.get("vocab_size")
    return config.get("model_type") in _ENCODERS or of_patches


def _dtype(config: dict[str, Any], file: Path) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ContractError(
            f"{file} has dtype {name!r}, which is not a torch dtype: give --dtype bfloat16, "
            f"float16 or float32"
        )
    return dtype


def _num_kv_heads(config: dict[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # Falcon ignores num_kv_heads in this case
    inner = (config.get("attn_config") or {}).get("kv_n_heads")
    return _first(config, "num_key_value_heads", "num_kv_heads") or inner or heads


def _head_sizes(config: dict[str, Any], hidden: int, heads: int) -> dict[str, int]:
    if config.get("kv_lora_rank") and config.get("qk_nope_head_dim"):
        # In MLA configs, head_dim is the size of the rotary part only.
        return {
            "head_size": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "head_size_v": config["v_head_dim"],
        }
    return {"head_size": config.get("head_dim") or (hidden or 0) // heads}


def _latent_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of a layer whose cache holds latents (P10); empty for other models."""
    latent, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if not latent or not rotary:
        return {}
    return {
        "num_kv_heads": 1,
        "head_size": latent + rotary,
        "head_size_v": latent,
        "use_mla": True,
    }


def _window(config: dict[str, Any]) -> int | None:
    """The sliding window W (M2), which includes the query's own key."""
    if config.get("use_sliding_window") is False:
        return None
    if config.get("local_attention"):
        # ModernBERT: the full width of the window; keys up to half of it away are visible.
        return int(config["local_attention"]) // 2 + 1
    return config.get("sliding_window")


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name)), None)
