"""One step of a `PagedModel`, and the attention of a module within it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.described_mask import read_mask
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.mixer_layers import MixerLayer
from attnlib.integrations.transformers.paged_batches import StepBatch
from attnlib.integrations.transformers.shared_layers import NeededRows
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.integrations.transformers.token_terms import (
    is_by_token,
    query_tensors,
    token_fields,
)
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["LayerGroupKey", "PagedStep", "attend"]

LayerGroupKey = tuple[type[AttentionBackend], AttentionSpec]
"""Layers of one group share a builder and the metadata of a step."""


class PagedStep:
    """One step of a `PagedModel`.

    Attributes:
        paged: the model.
        batch: as in `PagedModel.step`.
        needed: the tokens that layers without keys of their own compute; None for all.
        reached: the attention modules that have attended in this step.
        is_tree: the new tokens form trees (M20).
        position_ids: `[T]`, the position of each token in its sequence.
    """

    def __init__(
        self,
        paged: PagedModel,
        batch: StepBatch,
        needed: NeededRows | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        self.position_ids = position_ids
        self.paged = paged
        self.batch = batch
        self.needed = needed
        self.reached: set[nn.Module] = set()
        batches: Any = (batch,) if isinstance(batch, CommonAttentionMetadata) else batch.values()
        self.is_tree = any(getattr(one, "query_bias", None) is not None for one in batches)
        self._metadata: dict[LayerGroupKey, Any] = {}
        self._states: dict[tuple[type[AttentionBackend], str | None], list[StateMetadata]] = {}

    is_discovery = False
    """The step computes nothing and shows what the modules need."""

    def record(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """What stands for the attention of a module in a step that computes none; None in a step
        that does."""
        return None

    def state_metadata(self, one: MixerLayer) -> StateMetadata:
        """The metadata of this step for a state layer; built once per backend, and over a pool once
        per group."""
        group, number = one.place or (None, 0)
        key = (one.layer.backend, group)
        if key not in self._states:
            builder, batch = self.paged.states.layers.builder_of(one), self.batch
            if isinstance(batch, CommonAttentionMetadata):
                self._states[key] = [builder.build(0, batch)]
            else:
                given: Any = batch[group]  # type: ignore[index]  # over a pool, layers have groups
                self._states[key] = given.build(builder)
        return self._states[key][number]

    def metadata_for(self, layer: Attention, group: str | None = None) -> Any:
        """The metadata of this step for a layer; built once per group of layers.

        Args:
            layer: the layer.
            group: the group of its cache; None where a model has one batch.
        """
        key = (layer.backend, layer.spec)
        if key not in self._metadata:
            batch = self.batch if group is None else self.batch[group]  # type: ignore[index]  # a hybrid model
            assert isinstance(batch, CommonAttentionMetadata)
            if layer.spec.kv_sharing and self.needed is not None:
                batch = CommonAttentionMetadata.from_lengths(
                    self.needed.query_lens,
                    self.needed.seq_lens,
                    batch.block_table_tensor,
                    layer.spec.block_size,
                    batch.query_start_loc.device,
                )
            self._metadata[key] = self.paged.builder_of(layer).build(0, batch)
        return self._metadata[key]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attnlib_step: PagedStep,
    *,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one module in a paged step, in the shapes of transformers.

    Args:
        module: the attention module.
        query: `[1, Hq, T, D]`, the packed new tokens.
        key: `[1, Hkv, T, D]`.
        value: `[1, Hkv, T, Dv]`.
        attnlib_step: the step that `PagedModel.step` passed to the model.
        attention_mask: the mask of transformers for the packed row. Only its window and chunk size
            are used: the step defines which tokens belong to a request.
        scaling, sliding_window, softcap, s_aux: arguments of the module.
        kwargs: further arguments; those that would change the result are refused.

    Returns:
        `[1, T, Hq, Dv]`, and None for the weights.

    Raises:
        UnsupportedConfigError: the layer is not causal, or no spec expresses its bias or mask.
    """
    _refuse_call(module, kwargs)
    window, chunk = _window_and_chunk(module, attention_mask, sliding_window)
    sinks = kwargs.get("sinks") if s_aux is None else s_aux
    given = query_tensors(kwargs["position_bias"], sinks) if is_by_token(module) else None
    options = {
        "scaling": scaling,
        "sliding_window": window,
        "chunk": chunk,
        "softcap": softcap,
        "s_aux": sinks if given is None else None,
        "token_fields": {} if given is None else token_fields(module, sinks),
    }
    attnlib_step.reached.add(module)
    if (recorded := attnlib_step.record(module, query, key, value, options)) is not None:
        return recorded, None
    latent = attnlib_step.paged.latents.attend(module, query, key, attnlib_step, options)
    if latent is not None:
        return latent[None], None
    paged = attnlib_step.paged
    layer, cache = paged.attention.layer_of(module, query, value, options, attnlib_step.is_tree)
    metadata = attnlib_step.metadata_for(layer, paged.attention.groups.get(module))
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):  # steps with and without it share a cache
        q, k, v = (states.to(layer.spec.dtype) for states in (q, k, v))
    new = (k, v) if layer.writes else (None, None)  # P8: the keys are in the cache already
    out: torch.Tensor = layer(q, new[0], new[1], cache, metadata, query_tensors=given)
    return out[None], None


def _window_and_chunk(
    module: nn.Module, mask: torch.Tensor | None, window: int | None
) -> tuple[int | None, int | None]:
    """(sliding window, chunk size) of a call: those of the mask, which some modules do not pass
    themselves, and the window that the module passes."""
    if mask is None:
        return window, None
    step = read_mask(mask)
    if (
        not isinstance(step, StepMask)
        or step.pattern is None
        or not step.pattern.causal
        or step.pattern.spans is not None
        or step.attention_mask is not None
    ):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: the mask of this step is not composed of causality, a "
            f"window and chunks (padding, images, or a mask of the caller's own): over its own "
            f"paged cache attnlib serves text only, without attention_mask; use generate with "
            f"attn_implementation='attnlib'"
        )
    left = step.pattern.window.left
    if left is not None:
        window = min(left + 1, window or left + 1)
    return window, step.pattern.chunk


def _refuse_call(module: nn.Module, kwargs: dict[str, Any]) -> None:
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedConfigError(
            f"{layer_name(module)} is not causal: only decoders run in steps over a cache"
        )
    if kwargs.get("position_bias") is not None and not is_by_token(module):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: position_bias= covers the tokens of the packed row, but not "
            f"the keys in the cache; use generate with attn_implementation='attnlib'"
        )
