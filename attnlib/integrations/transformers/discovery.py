"""Finding the attention layers of a model, and creating their caches.

A forward of one token without attention shows what each attention module needs and whose keys it
gets. Only then is it known which layers form a group over one pool, and which need no cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup, with_equal_blocks
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.latents import LatentWeights
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.paged_calls import paged_forward
from attnlib.integrations.transformers.paged_step import PagedStep
from attnlib.layer import Attention
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["CreatedLayers", "DiscoveryStep", "FoundLayer", "create_layers", "discover"]


class FoundLayer(NamedTuple):
    """An attention module, as its first call describes it.

    Attributes:
        module: the module.
        spec: what it needs, with the block size of the model.
        options: keyword arguments of its attnlib layer.
        producer: the module whose keys and values it got; None for its own.
    """

    module: nn.Module
    spec: AttentionSpec
    options: dict[str, Any]
    producer: nn.Module | None


class DiscoveryStep(PagedStep):
    """A step that computes no attention: it records what the modules need, in their order."""

    is_discovery = True

    def __init__(self, paged: PagedModel) -> None:
        super().__init__(paged, {})
        self.found: list[FoundLayer] = []
        self._keys: list[tuple[torch.Tensor, FoundLayer]] = []

    def record(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Record a module; returns zeros in place of its output."""
        latents, size = self.paged.latents, value.shape[3]
        if module in latents.modules:
            spec, layer_options = latents.describe(module, query, options)
            size = LatentWeights(module).value_size
        else:
            spec, layer_options = self.paged.attention.describe(module, query, value, options)
        # A module that shares keys passes on the very tensor of another one.
        owner = next((one for tensor, one in self._keys if tensor is key), None)
        producer = None if owner is None or owner.spec != spec else owner.module
        found = FoundLayer(module, spec, layer_options, producer)
        self.found.append(found)
        self._keys.append((key, found if owner is None else owner))
        return query.new_zeros(1, query.shape[2], query.shape[1], size)


@torch.no_grad()
def discover(paged: PagedModel) -> list[FoundLayer]:
    """The attention modules of a model, by a forward of one token without attention and states. The
    mixers have layers afterwards.

    Raises:
        UnsupportedConfigError: an attention layer did not receive the step.
    """
    model: Any = paged.model
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    step = DiscoveryStep(paged)
    with paged.attached(), paged_forward(model), paged.states.running(step):
        model(input_ids=token, position_ids=token, use_cache=False, attnlib_step=step)
    if not step.found and not paged.states.modules:
        raise UnsupportedConfigError(
            f"{type(model).__name__}: no attention layer received the step; use generate with "
            "attn_implementation='attnlib'"
        )
    return step.found


class CreatedLayers(NamedTuple):
    """The layers of a model.

    Attributes:
        layers: attention module -> its attnlib layer and the cache that it reads.
        groups: attention module -> the group of its cache; empty without a pool.
        pool: the pool of all caches, or None.
    """

    layers: dict[nn.Module, tuple[Attention, PagedKVCache]]
    groups: dict[nn.Module, str]
    pool: HybridKVCache | None


def create_layers(paged: PagedModel, found: Sequence[FoundLayer]) -> CreatedLayers:
    """Create the layers and caches of a model.

    Args:
        paged: the model.
        found: its attention modules in the order of execution.
    """
    num_blocks, states = paged.num_blocks, paged.states.layers
    device = next(paged.model.parameters()).device
    owners = [one for one in found if one.producer is None]
    names = _group_names([one.spec for one in owners])
    pool = None
    caches: dict[nn.Module, PagedKVCache] = {}
    if paged.hybrid:
        counts = Counter(one.spec for one in owners)
        keys = {names[spec]: KVCacheGroup(spec, count) for spec, count in counts.items()}
        groups = with_equal_blocks({**keys, **states.groups()})
        pool = HybridKVCache(groups, num_blocks, device)
        states.use_pool(pool)
        free = {name: iter(group) for name, group in pool.caches.items()}
        caches = {one.module: next(free[names[one.spec]]) for one in owners}
    created = CreatedLayers({}, {}, pool)
    for one in found:
        options = one.options
        if one.producer is not None:
            producer, cache = created.layers[one.producer]
            spec = producer.spec.replace(kv_sharing=True)
            options = {**options, "kv_sharing_target_layer_name": layer_name(one.producer)}
        else:
            cache = caches.get(one.module) or PagedKVCache.allocate(one.spec, num_blocks, device)
            spec = one.spec.replace(block_size=cache.block_size)
        if one.module in paged.latents.modules:
            layer = paged.latents.create(one.module, spec, options)
        else:
            layer = Attention(spec, **options)
        created.layers[one.module] = (layer, cache)
        if pool is not None:
            created.groups[one.module] = names[one.spec]
    return created


def _group_names(specs: list[AttentionSpec]) -> dict[AttentionSpec, str]:
    """A name for each spec: by its window or chunk, then a number."""
    names: dict[AttentionSpec, str] = {}
    for spec in specs:
        if spec not in names:
            base = "full"
            if spec.attention_chunk_size:
                base = f"chunk {spec.attention_chunk_size}"
            elif spec.sliding_window:
                base = f"window {spec.sliding_window}"
            same = sum(name.split(" #")[0] == base for name in names.values())
            names[spec] = f"{base} #{same + 1}" if same else base
    return names
