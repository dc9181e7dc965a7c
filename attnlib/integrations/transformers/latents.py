"""Latent caches for models of transformers with multi-head latent attention (P10, M12).

The attention modules of these models compute latents and expand them to the keys and values of
every head in their method `expand_kv`, directly before they call the attention function. While
`unexpanded` holds, that method returns the latents themselves, so the attention function receives
them, and `LatentAttention` projects queries and outputs instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnlib.mla.latent_attention import LatentAttention
from attnlib.spec import AttentionSpec

__all__ = ["LatentWeights", "has_latents", "make_latent_attention", "unexpanded"]


class LatentWeights:
    """The sizes and the projection of an attention module with latents.

    Attributes:
        projection: `[Hq, P + V, R]`, a view of the weights of `kv_b_proj`.
        key_size: P, elements of a key without its rotary part.
        latent_size: R.
        value_size: V.
        rotary_size: elements of the rotary part.
    """

    def __init__(self, module: Any) -> None:
        self.key_size = int(module.qk_nope_head_dim)
        self.rotary_size = int(module.qk_rope_head_dim)
        weight: torch.Tensor = module.kv_b_proj.weight
        self.value_size = int(module.v_head_dim)
        rows = self.key_size + self.value_size
        self.projection = weight.detach().view(-1, rows, weight.shape[1])
        self.latent_size = weight.shape[1]

    @property
    def expanded_size(self) -> int:
        """Elements of the keys and values of all heads per token, which a latent stands for."""
        return self.projection.shape[0] * (self.projection.shape[1] + self.rotary_size)

    def spec(self, **fields: Any) -> AttentionSpec:
        """The spec of the latent layer; `fields` are its other fields."""
        return AttentionSpec(
            num_heads=self.projection.shape[0],
            num_kv_heads=1,
            head_size=self.latent_size + self.rotary_size,
            head_size_v=self.latent_size,
            dtype=self.projection.dtype,
            use_mla=True,
            **fields,
        )


def has_latents(module: nn.Module) -> bool:
    """Whether a module expands latents as `LatentAttention` does, with weights that are not
    quantized, and attends to all of them.

    The result of its `expand_kv` is compared with that of the projection for two random latents.
    """
    expand, linear = getattr(module, "expand_kv", None), getattr(module, "kv_b_proj", None)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if (
        expand is None
        or type(linear) is not nn.Linear
        or linear.bias is not None
        or not linear.weight.is_floating_point()
        or linear.weight.dtype.itemsize < 2
        or linear.weight.is_meta
        or not all(isinstance(getattr(module, name, None), int) for name in sizes)
        or getattr(module, "indexer", None) is not None
    ):
        return False
    weights, weight = LatentWeights(module), linear.weight
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        size = weights.latent_size
        shape, numbers = (1, 1, 2, size + weights.rotary_size), torch.float32
        random = torch.randn(shape, generator=draw, dtype=numbers, device="cpu").to(weight)
        key, value = expand(random[..., :size], random[..., size:])
        both = torch.einsum("hnr,tr->htn", weights.projection, random[0, 0, :, :size])
        keys, values = both.split([weights.key_size, both.shape[2] - weights.key_size], dim=-1)
        rotary = random[0, :, :, size:].expand(keys.shape[0], -1, -1)
        expected = torch.cat((keys, rotary), dim=-1)
    if key.shape[1:] != expected.shape or value.shape[1:] != values.shape:
        return False
    tolerance = {"rtol": 0.0, "atol": 0.05 * float(values.abs().max().clamp_min(1e-6))}
    return torch.allclose(key[0], expected, **tolerance) and torch.allclose(
        value[0], values, **tolerance
    )


@contextmanager
def unexpanded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which `expand_kv` of the modules returns latents: `[B, 1, S, R + rotary part]` as
    the key and `[B, 1, S, R]` as the value."""
    changed = list(modules)
    for module in changed:
        module.__dict__["expand_kv"] = _latents
    try:
        yield
    finally:
        for module in changed:
            module.__dict__.pop("expand_kv", None)


def _latents(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    latent = torch.cat((kv_nope, k_rot), dim=-1)
    return latent, latent[..., : kv_nope.shape[-1]]


def make_latent_attention(
    module: nn.Module, spec: AttentionSpec, **options: Any
) -> LatentAttention:
    """The layer of a module; `options` are those of `LatentAttention`."""
    weights = LatentWeights(module)
    return LatentAttention(spec, weights.projection, weights.key_size, **options)
