"""The attention modules of a `PagedModel` that cache latents (P10)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.latents import (
    LatentWeights,
    has_latents,
    make_latent_attention,
)
from attnlib.integrations.transformers.paged_step import PagedStep
from attnlib.layer import Attention
from attnlib.mla.latent_attention import LatentAttention
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["LatentLayers"]


class LatentLayers:
    """The modules with multi-head latent attention, and their layers.

    Args:
        paged: the model.
        modules: its modules.
        wanted: True requires latents, False keeps none, None keeps them where the backend supports
            them.

    Attributes:
        modules: the modules that keep latents.

    Raises:
        UnsupportedConfigError: `wanted` is True, and no module has latents that the backend
            supports.
    """

    def __init__(
        self, paged: PagedModel, modules: Iterable[nn.Module], wanted: bool | None
    ) -> None:
        self._paged = paged
        self._layers: dict[nn.Module, LatentAttention] = {}
        self.modules: list[nn.Module] = []
        if wanted is not False:
            self.modules = list(filter(self._is_supported, modules))
        if wanted and not self.modules:
            raise UnsupportedConfigError(
                f"{type(paged.model).__name__}: no attention module has latents that "
                f"{paged.attention.backend or 'a backend'} supports; leave out latents=True"
            )

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        step: PagedStep,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention of a module over latents; None if the module does not keep them.

        Args:
            module: the attention module.
            query: `[1, Hq, T, P + rotary part]`.
            key: `[1, 1, T, R + rotary part]`, the latents.
            step: the step.
            options: as in `PagedLayers.layer_of`.

        Returns:
            `[T, Hq, V]`.
        """
        if module not in self.modules:
            return None
        paged = self._paged.attention
        if module not in self._layers:
            spec, layer_options = self.describe(module, query, options)
            cache = PagedKVCache.allocate(spec, paged.num_blocks, query.device)
            paged.by_module[module] = (self.create(module, spec, layer_options), cache)
        layer, (_, cache) = self._layers[module], paged.layer_of(module, query, key, options)
        metadata = step.metadata_for(layer.layer, paged.groups.get(module))
        out: torch.Tensor = layer(query[0].transpose(0, 1), key[0, 0], cache, metadata)
        return out

    def describe(
        self, module: nn.Module, query: torch.Tensor, options: dict[str, Any]
    ) -> tuple[AttentionSpec, dict[str, Any]]:
        """As `PagedLayers.describe`, for a module that keeps latents."""
        paged = self._paged.attention
        spec = LatentWeights(module).spec(**paged.spec_fields(options))
        return spec, paged.layer_options(module, query, options)

    def create(self, module: nn.Module, spec: AttentionSpec, options: dict[str, Any]) -> Attention:
        """The attention layer of a module that keeps latents."""
        found = self._layers[module] = make_latent_attention(module, spec, **options)
        return found.layer

    def _is_supported(self, module: nn.Module) -> bool:
        """Whether a module has latents, and the backend supports a cache of them."""
        if not has_latents(module):
            return False
        paged = self._paged.attention
        if any(paged.stored[name] is not None for name in ("kv_rotation", "value_cache_dtype")):
            return False  # a latent is key and value at once
        try:
            spec = LatentWeights(module).spec(**paged.stored, block_size=paged.block_size)
            get_attn_backend(spec, paged.backend, next(module.parameters()).device)
        except UnsupportedConfigError:
            return False
        except ContractError as error:
            if error.rule != "M16":  # formats that store keys and values separately
                raise
            return False
        return True
