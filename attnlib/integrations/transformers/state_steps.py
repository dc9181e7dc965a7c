"""Steps of mixers of transformers as one call of attnlib: from convolution to gated norm.

A mixer calls a convolution, a recurrence and a norm, one after the other. The first two return
before they have computed: the convolution its input, whose channels reach the recurrence as views,
and the recurrence its memory, which reaches the norm as a view. The norm then computes all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnlib.cache.states import StateCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.layers import layer_name
from attnlib.layer.state import StateLayer
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states import StepForm

if TYPE_CHECKING:
    from attnlib.integrations.transformers.state_mixers import StateMixers

__all__ = ["PendingConvolution", "PendingStep", "channel_order", "norm_in_step", "norm_of"]


@dataclass(frozen=True, eq=False)
class PendingConvolution:
    """A convolution whose input `[T, C]` waits for the recurrence; fields of its spec, and tensors
    of its layer."""

    x: Tensor
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A step whose output waits for the norm.

    Attributes:
        layer, cache, metadata: of the step.
        x, gates: its inputs.
        form: fields of its form, without a norm.
        out: `[T, Hv * Dv]`, of the recurrence.
    """

    layer: StateLayer
    cache: StateCache
    metadata: StateMetadata
    x: Tensor
    gates: tuple[Tensor, Tensor | None]
    form: dict[str, Any]
    out: Tensor = field(repr=False)

    def run(self, norm: dict[str, Any] | None = None, gate: Tensor | None = None) -> Tensor:
        """Compute the step.

        Args:
            norm: fields of the form that `norm_of` returns, or None for no norm.
            gate: of the output, with as many elements.
        """
        z = None if gate is None else gate.reshape(self.out.shape).to(self.out.dtype)
        form = StepForm(**self.form, **(norm or {}))
        where = (self.cache, self.metadata)
        return self.layer.step(self.x, self.gates, z, form, *where, output=self.out)


def channel_order(x: Tensor, parts: Sequence[Tensor], mixer: nn.Module) -> str:
    """ "qkv" or "vkq", the order of the channels of which queries, keys and values are views.

    Raises:
        UnsupportedConfigError: they are not views of `x`.
    """
    query, key, value = parts
    keys, values = key[0, 0].numel(), value[0, 0].numel()
    found = [(part.data_ptr() - x.data_ptr()) // x.itemsize for part in parts]
    rows = {part.stride(1) for part in parts} | {x.stride(0)}
    for order, starts in (("qkv", [0, keys, 2 * keys]), ("vkq", [values + keys, values, 0])):
        if found == starts and (len(rows) == 1 or x.shape[0] == 1):
            return order
    raise UnsupportedConfigError(
        f"{layer_name(mixer)}: between convolution and recurrence, this release of transformers "
        "changes the channels; install transformers 5.24"
    )


def norm_of(mixer: nn.Module) -> tuple[nn.Module, dict[str, Any]] | None:
    """The gated RMS norm behind the recurrence of a mixer, and the fields of a `StepForm` for it;
    None if it has none."""
    norm: Any = getattr(mixer, "o_norm", getattr(mixer, "norm", None))
    if not type(norm).__name__.endswith("RMSNormGated"):
        return None
    weight = norm.weight.detach()
    groups = getattr(norm, "n_groups", 1)  # of Falcon-H1
    size = getattr(norm, "group_size", weight.numel() // groups)
    # In all releases, norms with an `activation` are those that normalize first.
    is_first = not hasattr(norm, "activation") and not getattr(norm, "norm_before_gate", False)
    return norm, {
        "norm_size": size,
        "norm_weight": weight,
        "norm_eps": norm.variance_epsilon,
        "output_gate": getattr(norm, "activation", "silu"),
        "gate_first": is_first,
    }


def norm_in_step(
    mixers: StateMixers, original: Callable[..., Any], fields: dict[str, Any]
) -> Callable[..., Any]:
    """The forward of a norm: that of a step if it gets its output, else `original`. A step that no
    norm computes is an error at the end of its mixer."""

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Any:
        step = mixers.pending
        if not isinstance(step, PendingStep) or hidden_states.data_ptr() != step.out.data_ptr():
            return original(hidden_states, gate)
        mixers.pending = None
        return step.run(fields, gate).view(hidden_states.shape)

    return forward
