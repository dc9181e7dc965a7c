"""The state layers of a model in a `PagedModel`: mixers over attnlib's slots (T1 to T20).

A mixer without a cache of transformers calls functions of its module: a convolution, then a
recurrence. Within a step, these names lead here; no forward is replaced. Calls of other models, and
outside of a step, reach transformers' functions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.states import StateCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import layer_name
from attnlib.layer.state import StateLayer
from attnlib.ops.state_gates import mamba2_gates
from attnlib.spec import StateSpec

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_step import PagedStep

__all__ = ["SERVED", "StateMixers"]

SERVED = frozenset(
    (
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba2",
    )
)
"""Model types whose mixers call these functions and nothing else; tests serve each of them."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", None: None}


class StateMixers:
    """The mixers of a model. The layers and slots of a mixer are made in its first call.

    Args:
        model: the model.
        num_slots: requests whose states are held at once.
        max_rollback: tokens of the last step that the next one may take back (T10).
        backend: as in `PagedModel`.

    Attributes:
        modules: the mixers.
        layers: (mixer, "convolution" or "recurrence") -> its layer and slots.

    Raises:
        UnsupportedConfigError: transformers has no such functions for the model.
    """

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        max_rollback: int,
        backend: str | type[AttentionBackend] | None,
    ) -> None:
        self.num_slots, self.max_rollback, self.backend = num_slots, max_rollback, backend
        config: Any = getattr(model, "config", None)
        served = getattr(config, "model_type", None) in SERVED
        self.modules = [m for m in model.modules() if served and _is_mixer(m)]
        self.layers: dict[tuple[nn.Module, str], tuple[StateLayer, StateCache]] = {}
        self._functions: dict[str, Callable[..., Any]] = {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._delta_rule,
            "chunk_kimi_delta_attention": self._delta_rule,
            "mamba2_chunk_scan": self._mamba2,
        }
        for mixer in self.modules:
            if not hasattr(_module_of(mixer), "causal_conv1d_fn"):
                raise UnsupportedConfigError(
                    f"{layer_name(mixer)}: this release of transformers has no causal_conv1d_fn "
                    f"in {type(mixer).__module__}; install transformers 5.24"
                )
        self._local = threading.local()

    @property
    def cache_bytes(self) -> int:
        """Total size of the slots in bytes."""
        return sum(cache.memory.numel() for _, cache in self.layers.values())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the functions of the mixers' modules lead here."""
        before: list[tuple[Any, str, Callable[..., Any]]] = []
        hooks = []
        try:
            for module in {_module_of(mixer) for mixer in self.modules}:
                for name in self._functions.keys() & vars(module).keys():
                    before.append((module, name, getattr(module, name)))
                    setattr(module, name, self._in_step(name, getattr(module, name)))
            for mixer in self.modules:
                hooks.append(mixer.register_forward_pre_hook(self._enter))
                hooks.append(mixer.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for module, name, function in before:
                setattr(module, name, function)
            for hook in hooks:
                hook.remove()

    @contextmanager
    def running(self, step: PagedStep) -> Iterator[None]:
        """Context of the forward of a step."""
        self._local.step, self._local.mixer = step, None
        try:
            yield
        finally:
            self._local.step = None

    def _enter(self, mixer: nn.Module, arguments: object) -> None:
        self._local.mixer = mixer

    def _leave(self, mixer: nn.Module, arguments: object, output: object) -> None:
        self._local.mixer = None

    def _in_step(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function of this name for mixers in a step, and `original` for all others."""
        function = self._functions[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            step, mixer = (getattr(self._local, key, None) for key in ("step", "mixer"))
            if step is None or mixer is None:
                return original(*args, **kwargs)
            return function(step, mixer, *args, **kwargs)

        return call

    def _layer(
        self,
        mixer: nn.Module,
        part: str,
        fields: dict[str, Any],
        tensors: dict[str, Any],
        scale: float | None = None,
    ) -> tuple[StateLayer, StateCache]:
        if (mixer, part) not in self.layers:
            device = next(iter(tensors.values())).device
            layer = StateLayer(
                StateSpec(**fields, max_rollback=self.max_rollback),
                backend=self.backend,
                scale=scale,
                prefix=f"{layer_name(mixer)} ({part})",
                device=device,
                **{name: x for name, x in tensors.items() if name in _LAYER_TENSORS},
            )
            cache = StateCache.allocate(layer.spec, self.num_slots, device=device)
            self.layers[mixer, part] = layer, cache
        return self.layers[mixer, part]

    def _convolve(
        self,
        step: PagedStep,
        mixer: nn.Module,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`causal_conv1d_fn`: `[1, C, T]` -> the same."""
        step.reached.add(mixer)
        if step.is_discovery:
            return torch.zeros_like(x)
        fields = {
            "conv_channels": x.shape[1],
            "conv_width": weight.shape[1],
            "conv_activation": _ACTIVATIONS[activation],
            "has_conv_bias": bias is not None,
            "dtype": x.dtype,
        }
        tensors = {"conv_weight": weight, "conv_bias": bias}
        layer, cache = self._layer(mixer, "convolution", fields, _given(tensors))
        out = layer.convolve(x[0].mT.contiguous(), cache, step.state_metadata(layer))
        return out.mT[None]

    def _delta_rule(
        self,
        step: PagedStep,
        mixer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""
        _refuse_states(mixer, kwargs)
        if step.is_discovery:
            return torch.zeros_like(value), None
        fields = {
            "num_heads": value.shape[2],
            "num_key_heads": key.shape[2],
            "key_size": key.shape[3],
            "value_size": value.shape[3],
            "decay": "head" if g.dim() == 3 else "channel",
            "qk_norm": use_qk_l2norm_in_kernel,
            "dtype": value.dtype,
        }
        layer, cache = self._layer(mixer, "recurrence", fields, {"value": value})
        gates = g[0].float(), beta[0].float()
        states = query[0], key[0], value[0]
        return layer(*states, *gates, cache, step.state_metadata(layer))[None], None

    def _mamba2(
        self,
        step: PagedStep,
        mixer: nn.Module,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803  # names of transformers
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        dt_softplus: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`mamba2_chunk_scan`."""
        _refuse_states(mixer, kwargs)
        if not dt_softplus:
            raise UnsupportedConfigError(f"{layer_name(mixer)}: step sizes without softplus")
        if step.is_discovery:
            return torch.zeros_like(x)
        fields = {
            "num_heads": x.shape[2],
            "num_key_heads": B.shape[2],
            "key_size": B.shape[3],
            "value_size": x.shape[3],
            "update": "add",
            "has_skip": D is not None,
            "dtype": x.dtype,
        }
        skip = None if D is None else D.detach().float()
        tensors = _given({"value": x, "skip": skip})
        layer, cache = self._layer(mixer, "recurrence", fields, tensors, scale=1.0)
        bias = torch.zeros_like(A) if dt_bias is None else dt_bias
        gates = mamba2_gates(dt[0], (-A.float()).log(), bias, dt_limit)
        metadata = step.state_metadata(layer)
        out: torch.Tensor = layer(C[0], B[0], x[0], *gates, cache, metadata)
        return out[None]


_LAYER_TENSORS = ("conv_weight", "conv_bias", "skip")


def _given(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def _is_mixer(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), nn.Conv1d) for name in ("conv1d", "conv"))


def _module_of(mixer: nn.Module) -> Any:
    """The Python module whose functions a mixer calls."""
    return sys.modules[type(mixer).__module__]


def _refuse_states(mixer: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse states of transformers, which a step has not."""
    names = ("initial_state", "initial_states", "output_final_state", "return_final_states")
    if any(kwargs.get(name) is not None and kwargs.get(name) is not False for name in names):
        raise UnsupportedConfigError(
            f"{layer_name(mixer)} is called with a cache of transformers: a step of a PagedModel "
            "holds its states in slots, so run it with use_cache=False"
        )
