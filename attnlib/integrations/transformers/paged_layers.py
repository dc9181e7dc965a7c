"""The layers, caches and builders of a `PagedModel`, by attention module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.hybrid import HybridKVCache
from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.latents import LatentWeights
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.paged_step import LayerGroupKey
from attnlib.kv_dtype import kv_cache_format
from attnlib.kv_rotation import KVRotation
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.ops.addresses import as_count
from attnlib.spec import AttentionSpec, MaskKind, tree_spec
from attnlib.workspace import BatchLimits

__all__ = ["PagedLayers"]

_STORED = ("kv_cache_dtype", "value_cache_dtype", "kv_rotation")


class PagedLayers:
    """What belongs to the attention modules of a model. A layer and its cache are made in the first
    call of a module, or are set together, for hybrid models.

    Args:
        num_blocks, block_size, backend, limits: as in `PagedModel`.
        stored: how the cache stores heads, the fields `_STORED` of a spec.

    Attributes:
        by_module: attention module -> its layer and the cache that it reads.
        groups: attention module -> the group of its cache; empty without a pool.
        pool: the pool of all caches, or None.

    Raises:
        ContractError: a number of blocks or a block size below 1, or a format or rotation that is
            not known.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        backend: str | type[AttentionBackend] | None,
        stored: tuple[Any, Any, Any],
        limits: BatchLimits | None,
    ) -> None:
        self.num_blocks = as_count("num_blocks", num_blocks, 1)
        self.block_size = as_count("block_size", block_size, 1)
        self.backend = backend
        self.stored = dict(zip(_STORED, stored, strict=True))
        for field in _STORED[:2]:
            if isinstance(name := self.stored[field], str):
                kv_cache_format(name, torch.float32, field)
        KVRotation.of(self.stored["kv_rotation"])
        self.limits = limits
        self.by_module: dict[nn.Module, tuple[Attention, PagedKVCache]] = {}
        self.groups: dict[nn.Module, str] = {}
        self.pool: HybridKVCache | None = None
        self._tree_layers: dict[nn.Module, Attention] = {}
        self._builders: dict[tuple[LayerGroupKey, torch.device], AttentionMetadataBuilder[Any]] = {}

    @property
    def specs(self) -> Counter[AttentionSpec]:
        """Number of layers for each spec; empty before the first step."""
        return Counter(layer.spec for layer, _ in self.by_module.values())

    @property
    def cache_bytes(self) -> int:
        """Total size of the caches in bytes; a shared cache counts once."""
        if self.pool is not None:
            return self.pool.nbytes
        caches = {id(cache): cache for _, cache in self.by_module.values()}
        return sum(cache.nbytes for cache in caches.values())

    def expanded_bytes(self, modules: Iterable[nn.Module]) -> int:
        """What `cache_bytes` would be with the keys and values of every head in place of latents,
        as with `latents=False`.

        Args:
            modules: those with latents.
        """
        total = self.cache_bytes
        for module in modules:
            if module in self.by_module:
                _, cache = self.by_module[module]
                tokens = cache.num_blocks * cache.block_size
                if self.pool is not None:
                    block_size = self.pool.groups[self.groups[module]].block_size
                    tokens = self.pool.num_blocks * block_size
                elements = LatentWeights(module).expanded_size - cache.key_cache.shape[-1]
                total += tokens * elements * cache.key_cache.itemsize
        return total

    def describe(
        self, module: nn.Module, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> tuple[AttentionSpec, dict[str, Any]]:
        """The spec of a module's attention and the keyword arguments of its layer. Arguments as in
        `layer_of`."""
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=value.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            dtype=query.dtype,
            **self.spec_fields(options),
        )
        return spec, self.layer_options(module, query, options)

    def layer_of(
        self,
        module: nn.Module,
        query: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
        in_tree: bool = False,
    ) -> tuple[Attention, PagedKVCache]:
        """The attnlib layer and the cache of an attention module.

        Args:
            module: the attention module.
            query: `[1, Hq, T, D]`.
            value: `[1, Hkv, T, Dv]`.
            options: scaling, sliding_window, chunk, softcap, s_aux and token_fields of the call.
            in_tree: the layer for trees of tokens (M20), over the same cache.
        """
        found = self.by_module.get(module)
        if found is None:
            spec, layer_options = self.describe(module, query, value, options)
            cache = PagedKVCache.allocate(spec, self.num_blocks, query.device)
            found = self.by_module[module] = (Attention(spec, **layer_options), cache)
        if not in_tree:
            return found
        layer, cache = found
        if module not in self._tree_layers:
            same = {**self.layer_options(module, query, options), "backend": layer.backend}
            self._tree_layers[module] = Attention(tree_spec(layer.spec), **same)
        return self._tree_layers[module], cache

    def builder_of(self, layer: Attention, device: torch.device) -> AttentionMetadataBuilder[Any]:
        """The metadata builder that all layers of one spec and backend share."""
        group = ((layer.backend, layer.spec), device)
        if group not in self._builders:
            self._builders[group] = layer.backend.make_builder(
                layer.spec, device, limits=self.limits
            )
        return self._builders[group]

    def spec_fields(self, options: dict[str, Any]) -> dict[str, Any]:
        """The fields of a spec that follow from the options of the call and of this model."""
        return {
            **self.stored,
            "block_size": self.block_size,
            "mask_kind": MaskKind.CAUSAL,
            "sliding_window": options["sliding_window"],
            "attention_chunk_size": options["chunk"],
            "logits_soft_cap": options["softcap"],
            "has_sink": options["s_aux"] is not None,
            **options["token_fields"],
        }

    def layer_options(
        self, module: nn.Module, query: torch.Tensor, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The keyword arguments of a layer."""
        return {
            "backend": self.backend,
            "scale": options["scaling"],
            "sinks": options["s_aux"],
            "prefix": layer_name(module),
            "device": query.device,
        }
