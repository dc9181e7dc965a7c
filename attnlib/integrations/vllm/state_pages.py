"""The states of a vLLM layer as slots of attnlib: one page of vLLM is one slot.

vLLM allocates the pages, gives each request one of them and takes it back. What a page holds is
attnlib's: `StatePages` answers with the bytes of a slot where vLLM's own layers answer with the
shapes of a window and a state. A slot knows its positions, so that a step needs no count of
accepted drafts and one page per request with drafts, too.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform

from attnlib.cache.states import StateCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.state_inputs import StepConstants, StepInputs, update_constants
from attnlib.integrations.vllm.state_metadata import AttnlibStateBackend, AttnlibStateBuilder
from attnlib.integrations.vllm.warm import GroupWarmup, register_kernels
from attnlib.layer.state import StateLayer
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states import StepForm
from attnlib.spec import StateSpec

__all__ = ["StateArguments", "StatePages"]

StateArguments = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Fields of a `StateSpec`, further arguments of its `StateLayer`, fields of a `StepForm`."""


class StatePages(MambaBase):
    """What attnlib's layers override of vLLM's.

    Args:
        args, kwargs: of vLLM's layer.

    Attributes:
        inputs: the tensors of the first call, without their memory.

    Raises:
        UnsupportedConfigError: a setting of vLLM that reads or writes pages of its own form.
    """

    prefix: str
    num_spec: int
    kv_cache: Any
    inputs: StepInputs | None = None
    group_warmup: GroupWarmup | None = None  # set by the builder of the layer's group
    _form: StepForm
    _cache: StateCache | None = None
    _pages: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        cache = config.cache_config
        moves = self.num_spec > 0 and cache.mamba_cache_mode != "none"
        for is_set, action in (
            (config.kv_transfer_config is not None, "leave out --kv-transfer-config"),
            (getattr(cache, "use_replayssm", False), "leave out --use-replayssm"),
            (cache.mamba_cache_mode == "all", "pass --mamba-cache-mode align"),
            (moves, "drafts need --no-enable-prefix-caching"),
        ):
            if is_set:
                raise UnsupportedConfigError(
                    f"{self.prefix}: with ATTNLIB_VLLM_STATES=1, pages of states have another form "
                    f"than vLLM would read: {action}"
                )
        self._layers = config.compilation_config.static_forward_context
        self._constants = StepConstants()
        register_kernels(torch.device(current_platform.device_type))

    @abstractmethod
    def state_arguments(self, constants: StepConstants) -> StateArguments:
        """What the layer is made of; `constants` gives what is computed from its weights."""

    @functools.cached_property
    def state_layer(self) -> StateLayer:
        """attnlib's layer; made when its weights are loaded."""
        fields, arguments, form = self.state_arguments(self._constants)
        self._form = StepForm(**form)
        weight = arguments["conv_weight"]  # of the dtype and on the device of the layer
        spec = StateSpec(
            dtype=weight.dtype,
            state_dtype=super().get_state_dtype()[-1],
            max_rollback=self.num_spec,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            **fields,
        )
        return StateLayer(spec, prefix=self.prefix, device=weight.device, **arguments)

    def get_attn_backend(self) -> type[AttnlibStateBackend]:
        """Whose builder makes the metadata of the layer."""
        return AttnlibStateBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """The bytes of a slot, in two parts: vLLM copies a page as a window, whose dimensions are
        tokens and channels, and a state."""
        half = self.state_layer.layout.bytes_per_slot // 2
        return (1, half), (half,)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """See `get_state_shape`."""
        return torch.uint8, torch.uint8

    def get_prefill_checkpoint_alignment(self) -> None:
        """None: a step ends where a state is kept (T16)."""

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One page per request, with drafts, too (T10).

        Raises:
            UnsupportedConfigError: a slot is larger than vLLM's blocks.
        """
        config, size = vllm_config.cache_config, self.state_layer.layout.bytes_per_slot
        page = config.mamba_page_size_padded
        if page is not None and size > page:
            tokens = -(-size * config.block_size // page // 16) * 16
            raise UnsupportedConfigError(
                f"{self.prefix}: a slot of attnlib has {size} bytes, and a block of "
                f"{config.block_size} tokens has {page}: pass --block-size {tokens}"
            )
        spec = super().get_kv_cache_spec(vllm_config)
        changes = {
            "num_speculative_blocks": 0,
            "num_prefill_checkpoint_blocks": 0,
            "prefill_checkpoint_alignment": None,
        }
        known = {name: value for name, value in changes.items() if hasattr(spec, name)}
        return replace(spec, **known)

    @functools.cached_property
    def _update_constants(self) -> Callable[[], None]:
        """Called at each step; the first layer does it for all, which vLLM has made in order."""
        layers = [layer for layer in self._layers.values() if isinstance(layer, StatePages)]
        if layers and layers[0] is not self:
            return lambda: None
        for layer in layers:
            assert layer.state_layer  # which adds its constants
        return update_constants(layer._constants for layer in layers)

    def warmup_key(self, layer: Any) -> Hashable:
        """Equal for layers of a group with the same kernels."""
        cache = self._bound_cache()
        return self.state_layer.spec, self._form.scalars, cache.signature, self.inputs

    def warm_up(self, layer: Any, builder: AttnlibStateBuilder, shared: bool) -> None:
        """Compile the kernels of this layer. Arguments as of `AttnlibImpl.warm_up`."""
        state, inputs = self.state_layer, self.inputs
        assert inputs is not None
        if state.backend.get_name() == "torch":
            return
        for metadata in builder.warmup_metadata(shared):
            x, gates, output = inputs.zeros(metadata.num_actual_tokens)
            cache = self._bound_cache()
            state.step(x, gates, None, self._form, cache, metadata, output=output)

    def run_step(self, x: Tensor, gates: Any, output: Tensor) -> None:
        """Convolution, gates and recurrence of the batch.

        Args:
            x: `[T, C]`, before the convolution.
            gates: of `StateLayer.step`.
            output: `[T, Hv * Dv]`, written.
        """
        of_layers = get_forward_context().attn_metadata
        metadata: StateMetadata | None = of_layers.get(self.prefix) if of_layers else None
        self.inputs = self.inputs or StepInputs.of(x, gates, output)
        if self.group_warmup is not None and self.group_warmup.pending:
            self.group_warmup.run(between_batches=metadata is None)
        if metadata is None:  # vLLM measures memory
            output.zero_()
            return
        self._update_constants()
        layer, cache = self.state_layer, self._bound_cache()
        layer.step(x, gates, None, self._form, cache, metadata, output=output)

    def _bound_cache(self) -> StateCache:
        first: Tensor = self.kv_cache[0]
        if first is not self._pages or self._cache is None:
            size = self.state_layer.layout.bytes_per_slot
            pages = first.as_strided((first.shape[0], size), (first.stride(0), 1))
            self._cache = StateCache(self.state_layer.spec, pages)
            self._pages = first
        return self._cache
