"""A model over selected latents (DeepSeek V3.2) whose indexer selects by positions.

The indexer's own kernels need a GPU. It is vLLM's, not attnlib's: what it writes, the positions of
the keys of each query, comes from a rule here, so that transformers can attend to the same keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SELECTED = 64
"""Keys of a query at most (`index_topk`)."""


def selects(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Whether the query at a position sees a key: the last eight, and every fourth before."""
    behind = query - key
    return (behind >= 0) & ((behind < 8) | ((query + key) % 4 == 0))


def mask(tokens: int) -> torch.Tensor:
    """What transformers adds to the scores, `[1, 1, T, T]`."""
    at = torch.arange(tokens)
    visible = selects(at[:, None], at)
    assert int(visible.sum(1).max()) <= SELECTED
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~visible, torch.finfo(torch.float32).min)


def write(folder: Path) -> None:
    """Turn a saved DeepSeek V3 into a V3.2: its architecture, and random weights of indexers."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_topk": SELECTED, "index_n_heads": 2, "index_head_dim": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    rows = {"wq_b": (256, config["q_lora_rank"]), "wk": (128, config["hidden_size"])}
    rows["weights_proj"] = 2, config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        indexer = f"model.layers.{layer}.self_attn.indexer"
        weights |= {f"{indexer}.{name}.weight": torch.randn(shape) for name, shape in rows.items()}
        weights |= {f"{indexer}.k_norm.weight": torch.ones(128)}
        weights |= {f"{indexer}.k_norm.bias": torch.zeros(128)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def select_by_positions() -> None:
    """Let the indexers of this process write what `selects` says."""
    from vllm.model_executor.models.deepseek_v2 import Indexer

    def forward(self: Any, hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        buffer, query = self.topk_indices_buffer, arguments[1][:, None]
        keys = torch.arange(self.max_model_len, dtype=torch.int32)
        chosen = torch.where(selects(query, keys), keys, -1).sort(1, descending=True).values
        buffer[: len(query)] = chosen[:, :SELECTED]
        return buffer

    Indexer.forward = forward
