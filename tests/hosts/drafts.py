"""A draft model whose tokens see each other (DFlash), and a check of its attention in engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

TOKENS = 3
"""Tokens that are drafted at once."""


def write(folder: Path, sizes: dict[str, Any]) -> None:
    """Two layers over the states of layers 0 and 2 of a model with these sizes, seeded weights."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(4)
    config = Qwen3Config(**{**sizes, "num_hidden_layers": 2}, initializer_range=0.2)
    width = config.hidden_size
    weights = {
        name: weight.contiguous()
        for name, weight in Qwen3Model(config).float().state_dict().items()
        if "embed_tokens" not in name  # those of the target
    }
    weights |= {
        "fc.weight": torch.randn(width, 2 * width) / 20,
        "hidden_norm.weight": torch.ones(width),
    }
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    stated |= {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "float32",
        "block_size": TOKENS + 1,
        "dflash_config": {
            "mask_token_id": 511, "target_layer_ids": [0, 2], "use_aux_hidden_state": True
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stated))


def write_noisy(folder: Path, target: Path) -> None:
    """A model to draft with, some of whose tokens are those of another one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head + torch.randn_like(head) * head.std() / 2
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def watch() -> dict[str, float]:
    """Compare every layer of drafts with attention over all keys of a request in vLLM's cache; the
    largest error, and the smallest distance of a batch to causal attention."""
    from attnlib.integrations.vllm.builder import AttnlibMetadataBuilder
    from attnlib.integrations.vllm.impl import AttnlibImpl
    from attnlib.integrations.vllm.masks import Mask

    found = {"calls": 0.0, "error": 0.0, "to_causal": float("inf")}
    forward, build = AttnlibImpl.forward, AttnlibMetadataBuilder._metadata
    batches: dict[int, Any] = {}

    def building(self: Any, batch: Any, build_each: Any) -> Any:
        metadata = build(self, batch, build_each)
        batches[id(metadata)] = batch, metadata  # which keeps the id
        return metadata

    def attending(self: Any, layer: Any, query: Any, *args: Any, **more: Any) -> Any:
        out = forward(self, layer, query, *args, **more)
        cache, metadata = args[2], args[3]
        if metadata is not None and metadata.mask is Mask.FULL:
            batch = batches[id(metadata)][0]
            full, causal = (_dense(self, query, cache, batch, flag) for flag in (False, True))
            rows = out[: batch.num_actual_tokens].view_as(full)
            found["calls"] += 1
            found["error"] = max(
                found["error"], float((rows - full).abs().nan_to_num(torch.inf).max())
            )
            found["to_causal"] = min(found["to_causal"], float((full - causal).abs().max()))
        return out

    AttnlibImpl.forward = attending  # type: ignore[method-assign]
    AttnlibMetadataBuilder._metadata = building  # type: ignore[method-assign]
    return found


def _dense(impl: Any, query: torch.Tensor, cache: Any, batch: Any, causal: bool) -> torch.Tensor:
    """Outputs `[T, Hq, D]`, from the tensors that vLLM passes."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    outs, size, block = [], impl.head_size, cache.shape[2]
    for request, length in enumerate(lengths):
        q = query[starts[request] : starts[request + 1]].view(-1, impl.num_heads, size)
        at = torch.arange(length)
        blocks = batch.block_table_tensor[request, at // block].long()
        pairs = cache[blocks, :, at % block]  # [L, Hkv, 2 * D]
        groups = impl.num_heads // impl.num_kv_heads
        keys, values = pairs.repeat_interleave(groups, 1).split(size, dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * impl.scale
        if causal:
            ahead = at > torch.arange(length - len(q), length)[:, None]
            scores = scores.masked_fill(ahead, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)
