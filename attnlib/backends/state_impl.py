"""The base class of implementations of state layers: one layer on one backend."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from attnlib.cache.states import StateCache
from attnlib.errors import ContractError
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states import RecurrenceParams, Taps
from attnlib.ops.states.inputs import StateInputs
from attnlib.ops.states.step_form import FusedInputs
from attnlib.ops.torch.states.step_parts import gated_norm, state_gates
from attnlib.spec import StateSpec

__all__ = ["StateImpl", "StateInputs", "StateOperations", "StateOwner", "StepPlan"]


StepPlan = Callable[..., None]
"""`run(impl, inputs, cache, metadata, output)`, for any layer of a group: the call of one method
over a batch whose slots, addresses and values may differ from those that it was made for."""


class StateOwner(Protocol):
    """The tensors of a layer, which its impl reads in every call; None for what it has not."""

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    skip: Tensor | None


class StateImpl(ABC):
    """One state layer on one backend.

    Args:
        spec: of the layer, accepted by the backend, with its form and chunk size.
        scale: factor of q; None means 1 / sqrt(Dk).
        owner: the layer, which holds its tensors.
        config: settings of the backend.
        prefix: name of the layer, for messages.

    Attributes:
        group: layers with equal groups share plans.
        checks_positions: every call refuses slots that cannot continue (T8).
        state_gates, gated_norm: gates and norm of `StateLayer.step` in launches of their own.

    Raises:
        ContractError: the scale is not finite.
    """

    checks_positions: ClassVar[bool] = False
    state_gates: ClassVar[Callable[..., Any]] = staticmethod(state_gates)
    gated_norm: ClassVar[Callable[..., None]] = staticmethod(gated_norm)

    def __init__(
        self,
        spec: StateSpec,
        *,
        owner: StateOwner,
        scale: float | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self.spec = spec
        self.scale = spec.default_scale if scale is None else float(scale)
        if not math.isfinite(self.scale):
            raise ContractError(f"scale={self.scale} must be finite", rule="T4")
        self.owner = owner
        self.config = dict(config or {})
        self.prefix = prefix
        settings = tuple(sorted((name, repr(value)) for name, value in self.config.items()))
        self.group: Hashable = (type(self), spec, self.scale, settings)

    @property
    def params(self) -> RecurrenceParams:
        """The parameters of the recurrence, for the operations of `attnlib.ops`."""
        spec = self.spec
        return RecurrenceParams(
            scale=self.scale,
            update=spec.update,
            qk_norm=spec.qk_norm,
            skip=self.owner.skip,
            is_invariant=spec.batch_invariant,
        )

    @property
    def taps(self) -> Taps:
        """The same of the convolution."""
        weight = self.owner.conv_weight
        assert weight is not None  # the layer checks it
        return Taps(weight, self.owner.conv_bias, self.spec.conv_activation)

    @abstractmethod
    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> None:
        """Update the states of a batch, and write the outputs (T1 to T14).

        Args:
            inputs: of T or more tokens; shapes and dtypes are checked.
            cache: the slots of the layer, in its layout.
            metadata: the batch.
            output: `[T, Hv, Dv]`, written in place. Rows past the batch and rows of slot -1 become
                0.
        """

    @abstractmethod
    def convolve(
        self, x: Tensor, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> None:
        """Convolve the tokens of a batch with the owner's weights, and keep their windows (T6).

        Args:
            x: `[T, C]`, strided.
            cache, metadata: as in `step`.
            output: `[T, C]`, written in place, with rows of 0 as in `step`.
        """

    def plan_step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> StepPlan:
        """Prepare the calls of `step` over a batch that differ from this one in slots, addresses
        and values only. The layer calls it once per batch and call signature, after its checks.

        Returns:
            By default, `step` itself.
        """
        return type(self).step

    def plan_convolution(
        self, x: Tensor, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> StepPlan:
        """The same for `convolve`."""
        return type(self).convolve

    def plan_fused_step(
        self, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> StepPlan | None:
        """The same for `StateLayer.step` in one launch, with the bits of separate ones if the layer
        is batch-invariant. With None, which a backend may return for some batches, the layer runs
        these."""
        return None


class StateOperations(StateImpl):
    """A layer that runs the two operations of a package of `attnlib.ops`.

    Attributes:
        state_step, short_convolution: the operations (`attnlib.ops.torch.states`).
    """

    state_step: ClassVar[Callable[..., None]]
    short_convolution: ClassVar[Callable[..., None]]

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> None:
        """See `StateImpl.step`."""
        self.state_step(inputs, cache.tensors, metadata.batch, self.params, out=output)

    def convolve(
        self, x: Tensor, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> None:
        """See `StateImpl.convolve`."""
        self.short_convolution(x, self.taps, cache.tensors, metadata.batch, out=output)
