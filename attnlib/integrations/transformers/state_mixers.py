"""The state layers of a model in a `PagedModel`: mixers over attnlib's slots (T1 to T20).

A mixer without a cache of transformers calls functions of its module: a convolution, then a
recurrence. Within a step, these names lead here (`state_steps`); only the forwards of norms and of
mixers that call none of them (`forward_of`) are replaced. Calls of other models, and outside of a
step, reach transformers' functions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import state_steps as steps
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.mixer_forwards import forward_of, is_mixer
from attnlib.integrations.transformers.mixer_layers import MixerLayers
from attnlib.integrations.transformers.state_calls import FUNCTIONS, MixerCall

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_step import PagedStep

__all__ = ["SERVED", "StateMixers"]

SERVED = frozenset(
    (
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "inkling2",
        "inkling2_text",
        "inkling_mm_model",
        "inkling_text",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba2",
    )
)
"""Model types whose mixers are served; tests serve each of them."""


class StateMixers:
    """The mixers of a model.

    Args:
        model: the model.
        layers: of its mixers.

    Attributes:
        modules: the mixers.
        layers: as given.

    Raises:
        UnsupportedConfigError: transformers has no such functions for the model.
    """

    def __init__(self, model: nn.Module, layers: MixerLayers) -> None:
        self.layers = layers
        config: Any = getattr(model, "config", None)
        served = getattr(config, "model_type", None) in SERVED
        self.modules = [m for m in model.modules() if served and is_mixer(m)]
        for mixer in self.modules:
            if not (forward_of(mixer) or hasattr(_module_of(mixer), "causal_conv1d_fn")):
                raise UnsupportedConfigError(
                    f"{layer_name(mixer)}: this release of transformers has no causal_conv1d_fn "
                    f"in {type(mixer).__module__}; install transformers 5.24"
                )
        self._local = threading.local()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the functions of the mixers' modules lead here."""
        with ExitStack() as stack:
            for module in {_module_of(mixer) for mixer in self.modules}:
                for name in FUNCTIONS.keys() & vars(module).keys():
                    function = self._in_step(getattr(module, name), FUNCTIONS[name])
                    _replace(stack, module, name, function)
            for mixer in self.modules:
                if (own := forward_of(mixer)) is not None:
                    _replace(stack, mixer, "forward", self._in_step(mixer.forward, own, mixer))
                elif (found := steps.norm_of(mixer)) is not None:
                    norm, fields = found
                    _replace(stack, norm, "forward", steps.norm_in_step(self, norm.forward, fields))
                stack.callback(mixer.register_forward_pre_hook(self._enter).remove)
                stack.callback(mixer.register_forward_hook(self._leave, always_call=True).remove)
            yield

    @contextmanager
    def running(self, step: PagedStep) -> Iterator[None]:
        """Context of the forward of a step."""
        self._local.step, self._local.mixer = step, None
        try:
            yield
        finally:
            self._local.step = None

    def _enter(self, mixer: nn.Module, arguments: object) -> None:
        self._local.mixer, self.pending = mixer, None

    def _leave(self, mixer: nn.Module, arguments: object, output: object) -> None:
        self._local.mixer = None
        if self.pending is not None and output is not None:
            raise UnsupportedConfigError(
                f"{layer_name(mixer)}: in this release of transformers, its norm does not read the "
                "output of its recurrence; install transformers 5.24"
            )

    @property
    def pending(self) -> steps.PendingConvolution | steps.PendingStep | None:
        """What the mixer in this thread has called, and a later call computes."""
        return getattr(self._local, "pending", None)

    @pending.setter
    def pending(self, value: steps.PendingConvolution | steps.PendingStep | None) -> None:
        self._local.pending = value

    def has_recurrence(self, mixer: nn.Module) -> bool:
        """Whether the mixer calls a recurrence after its convolution."""
        return bool((FUNCTIONS.keys() - {"causal_conv1d_fn"}) & vars(_module_of(mixer)).keys())

    def _in_step(
        self,
        original: Callable[..., Any],
        function: Callable[..., Any],
        mixer: nn.Module | None = None,
    ) -> Callable[..., Any]:
        """`function` for a mixer in a step, by default the one that runs; else `original`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            step, running = (getattr(self._local, key, None) for key in ("step", "mixer"))
            caller = running if mixer is None else mixer
            if step is None or caller is None:
                return original(*args, **kwargs)
            return function(MixerCall(self, step, caller), *args, **kwargs)

        return call


def _replace(stack: ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Give `owner` an attribute until the stack closes; then that of its class shows again, or its
    own."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, function)


def _module_of(mixer: nn.Module) -> Any:
    """The Python module whose functions a mixer calls."""
    return sys.modules[type(mixer).__module__]
