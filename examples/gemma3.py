"""Gemma 3 in plain torch over packed tokens, for the tutorial's engine.

The new tokens of all requests of a step form one dimension of length T, without padding. Attention
is a function that the caller gives. It also normalizes queries and keys per head and rotates them,
because a cache stores the rotated keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlib import example_model

__all__ = ["Decoder", "Layer", "load", "random_decoder"]


class Layer(nn.Module):
    """A layer of Gemma 3 without its attention."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, size, inner = (
            config[name] for name in ("hidden_size", "head_dim", "intermediate_size")
        )
        q, kv = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
        self.q_proj, self.o_proj = nn.Linear(hidden, q, False), nn.Linear(q, hidden, False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv, False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, False)
        self.q_norm, self.k_norm = (nn.RMSNorm(size, 1e-6) for _ in range(2))  # by attention
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, 1e-6) for _ in range(2)
        )
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            nn.RMSNorm(hidden, 1e-6) for _ in range(2)
        )

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        h = self.input_layernorm(x)
        h = self.o_proj(attend(self.q_proj(h), self.k_proj(h), self.v_proj(h)))
        x = x + self.post_attention_layernorm(h)
        h = self.pre_feedforward_layernorm(x)
        h = self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))
        return x + self.post_feedforward_layernorm(h)


class Decoder(nn.Module):
    """Gemma 3. `attend(number, q, k, v, cos, sin)` is the attention of a layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.kinds = config, config["layer_types"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in self.kinds)
        self.norm = nn.RMSNorm(config["hidden_size"], 1e-6)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.embed_tokens(tokens) * self.config["hidden_size"] ** 0.5
        angles = {kind: self.angles(kind, positions) for kind in set(self.kinds)}
        rotary = {kind: (angle.cos(), angle.sin()) for kind, angle in angles.items()}
        for number, (kind, layer) in enumerate(zip(self.kinds, self.layers, strict=True)):
            x = layer(x, lambda q, k, v, n=number, kind=kind: attend(n, q, k, v, *rotary[kind]))
        return self.norm(x)

    def angles(self, kind: str, positions: Tensor) -> Tensor:
        half = self.config["head_dim"] // 2
        theta = self.config["rope_parameters"][kind]["rope_theta"]
        return positions[:, None] * theta ** -(torch.arange(half, device=positions.device) / half)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed_tokens.weight.T


def load(
    *, random: bool = False
) -> tuple[Decoder, Callable[[str], list[int]], Callable[[list[int]], str] | None]:
    """The model with its `encode` and `decode`; random weights on request, or if it is not
    installed."""
    if random or not example_model.is_installed():
        if not random:
            print(f"random weights write no text; for a real model: {example_model.INSTALL}")
        return random_decoder(), lambda text: list(text.encode())[::3], None
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = example_model.checkpoint()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, weights = Decoder(json.loads((folder / "config.json").read_text())), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for part in ("model.", "self_attn.", "mlp."):
            name = name.replace(part, "")
        weights[name] = weight.float() + name.endswith("norm.weight")  # stored as weight - 1
    model.load_state_dict(weights)
    return model, lambda text: tokenizer.encode(text).ids, tokenizer.decode


def random_decoder(
    kinds: Sequence[str] = ("sliding_attention", "full_attention"),
) -> Decoder:
    """A small decoder over bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {kind: {"rope_theta": 1000.0} for kind in kinds}
    layers = {"layer_types": list(kinds), "sliding_window": 9, "rope_parameters": rope}
    model = Decoder({**sizes, **heads, **layers})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model
