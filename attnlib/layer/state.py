"""The state layer: `StateLayer(q, k, v, log_decay, beta, cache, metadata)` updates the states of a
batch and returns its outputs; `convolve` runs the short convolution before it.

Everything a step needs is an argument. The layer keeps what belongs to one layer of one model: its
spec, backend and impl, and its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlib.backends.base import AttentionBackend
from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache, state_layout
from attnlib.compile.objects import register
from attnlib.errors import ContractError
from attnlib.layer.state_call import call_convolution, call_step
from attnlib.layer.state_checks import check_layer_tensors
from attnlib.layer.state_fused import call_fused_step, separate_step
from attnlib.layer.state_operator import convolve_opaquely, step_opaquely
from attnlib.layer.tensor_checks import refuse_in_place, refuse_types
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.selection import get_attn_backend
from attnlib.spec import StateSpec

__all__ = ["StateLayer"]

_OPTIONAL = (Tensor, type(None))
_STEP: tuple[Any, ...] = (Tensor, Tensor, Tensor, _OPTIONAL, _OPTIONAL)
_FUSED: tuple[Any, ...] = (Tensor, _OPTIONAL, _OPTIONAL, _OPTIONAL, StepForm)
"""Types of `StateInputs` and `FusedInputs`."""
_FUSED_NAMES = ("x", "gates[0]", "gates[1]", "z", "form")
"""What callers of `StateLayer.step` know the fields of `FusedInputs` as."""


class StateLayer(nn.Module):
    """One layer with a recurrent state, a short convolution, or both (T1 to T20).

    Args:
        spec: what the layer needs.
        backend: a name, a class, or None for selection by `use_backend`, ATTNLIB_BACKEND, priority.
        scale: factor of q; None means 1 / sqrt(key_size).
        conv_weight: `[C, W]` in the dtype of the spec, the last column for the token itself.
        conv_bias: `[C]`, with `spec.has_conv_bias`.
        skip: `[Hv]` float32, with `spec.has_skip`.
        log_decay: `[Hv]` float32, of a layer with `decay="constant"`.
        prefix: the layer's name, for messages.
        device: where the layer will run; None means a GPU if torch sees one, else the CPU.

    Tensors become buffers; parameters stay parameters.

    Attributes:
        spec: as given, with the form and the chunk size that the backend chose. Allocate its cache
            from it: `StateCache.allocate(layer.spec, num_slots)`.
        layout: of its slots.

    Raises:
        ContractError: tensors that contradict the spec.
        UnknownBackendError: no backend of this name is registered.
        BackendUnavailableError: the backend cannot run on this machine.
        UnsupportedConfigError: the backend does not support the spec.
    """

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    skip: Tensor | None
    log_decay: Tensor | None

    def __init__(
        self,
        spec: StateSpec,
        *,
        backend: str | type[AttentionBackend] | None = None,
        scale: float | None = None,
        conv_weight: Tensor | None = None,
        conv_bias: Tensor | None = None,
        skip: Tensor | None = None,
        log_decay: Tensor | None = None,
        prefix: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        StateSpec.check_kind(spec, "StateLayer")
        self.backend = get_attn_backend(spec, backend, device, layer_name=prefix)
        self.spec = self.backend.resolve_state_spec(spec)
        self.layout = state_layout(self.spec)
        self.prefix = prefix
        tensors = dict(conv_weight=conv_weight, conv_bias=conv_bias, skip=skip, log_decay=log_decay)
        refuse_types(tensors, [_OPTIONAL] * 4)
        check_layer_tensors(spec, tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.impl = self.backend.get_state_impl_cls()(
            self.spec, owner=self, scale=scale, config=self.backend.config, prefix=prefix
        )
        self.handle = register(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        cache: StateCache,
        metadata: StateMetadata,
        *,
        output: Tensor | None = None,
    ) -> Tensor:
        """Update the states of the batch with its new tokens, and read them.

        Args:
            query, key: `[T, Hk * Dk]` or `[T, Hk, Dk]`, strided, before their norm. T may exceed
                the batch's tokens (padding); the output of those rows is 0 (T3).
            value: `[T, Hv * Dv]` or `[T, Hv, Dv]`.
            log_decay: `[T, Hv]` or `[T, Hv, Dk]` float32, at most 0 (T5); None if it is constant.
            beta: `[T, Hv]` float32, exactly if the spec has it.
            cache: the slots of this layer.
            metadata: the batch's metadata, from `backend.make_builder(spec, device)`.
            output: where to write, `[T, Hv * Dv]` or `[T, Hv, Dv]`, apart from the inputs; None
                allocates.

        Returns:
            The output, flat or per head like `value`.

        Raises:
            ContractError: a tensor does not fit the spec, the cache or the batch, or a slot cannot
                continue from where its request does (T8; the torch backend always checks it,
                others with ATTNLIB_VALIDATE=1). Nothing is written then.
        """
        decay: Any = self.log_decay if log_decay is None else log_decay
        inputs = StateInputs(query, key, value, decay, beta)
        if not all(map(isinstance, inputs, _STEP)):
            refuse_types(inputs._asdict(), _STEP)
        compiles = torch.compiler.is_compiling()
        if output is None:
            output = torch.empty(value.shape, dtype=self.spec.dtype, device=value.device)
        elif not compiles:
            refuse_in_place(output, **inputs._asdict())
        (step_opaquely if compiles else call_step)(self, inputs, cache, metadata, output)
        return output

    def convolve(
        self, x: Tensor, cache: StateCache, metadata: StateMetadata, *, output: Tensor | None = None
    ) -> Tensor:
        """Convolve the channels of the batch's new tokens, and keep the windows (T6).

        Args:
            x: `[T, C]`, strided; T may exceed the batch's tokens.
            cache, metadata: as in `forward`.
            output: where to write, `[T, C]`, not in `x`; None allocates.

        Returns:
            `[T, C]`.

        Raises:
            ContractError: as `forward`.
        """
        if not isinstance(x, Tensor):
            refuse_types({"x": x}, _STEP)
        compiles = torch.compiler.is_compiling()
        if output is None:
            output = torch.empty(x.shape, dtype=self.spec.dtype, device=x.device)
        elif not compiles:
            refuse_in_place(output, x=x)
        (convolve_opaquely if compiles else call_convolution)(self, x, cache, metadata, output)
        return output

    def step(
        self,
        x: Tensor,
        gates: tuple[Tensor | None, Tensor | None],
        z: Tensor | None,
        form: StepForm,
        cache: StateCache,
        metadata: StateMetadata,
        *,
        output: Tensor | None = None,
    ) -> Tensor:
        """Convolution, gates, recurrence and norm: one launch for decodes where the backend
        declares `fused_step`, else separate ones, with the same bits but in torch.compile.

        Args:
            x: `[T, C]`, with dense rows; its channels are those of queries, keys and values.
            gates: projections, `[T, Hv]` each and the first `[T, Hv, Dk]` with decays per channel;
                or log decay and beta, if the form says so; None for what the layer has not.
            z: `[T, Hv * Dv]`, of the output gate, or None.
            form: the formulas and their tensors.
            cache, metadata: as in `forward`.
            output: where to write, `[T, Hv * Dv]`, not in `x` or `z` unless torch.compile traces
                the step; None allocates.

        Returns:
            `[T, Hv * Dv]`.

        Raises:
            ContractError: as `forward`, or a form that is not one of the layer.
        """
        if not isinstance(gates, tuple | list) or len(gates) != 2:
            raise ContractError(f"gates is a {type(gates).__name__}; it must be a pair of gates")
        decay: Any = self.log_decay if gates[0] is None else gates[0]
        inputs = FusedInputs(x, decay, gates[1], z, form)
        if not all(map(isinstance, inputs, _FUSED)):
            refuse_types(dict(zip(_FUSED_NAMES, inputs, strict=True)), _FUSED)
        made, compiles = output, torch.compiler.is_compiling()
        if made is None:
            shape = (x.shape[0], self.spec.num_heads * self.spec.value_size)
            made = torch.empty(shape, dtype=self.spec.dtype, device=x.device)
        elif compiles:
            made = torch.empty_like(made)  # tracing sees no addresses: `z` may be in the output
        else:
            refuse_in_place(made, **dict(zip(_FUSED_NAMES[:4], inputs[:4], strict=True)))
        (separate_step if compiles else call_fused_step)(self, inputs, cache, metadata, made)
        return output.copy_(made) if compiles and output is not None else made

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("backend", "layout", "spec") and name in self.__dict__:
            raise ContractError(
                f"{name} of layer {self.prefix or '(unnamed)'} cannot be assigned, because its "
                "impl was made for the one it has: make a new layer"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.handle = register(self)  # a copy of a layer is another layer
        self.impl.owner = self

    def extra_repr(self) -> str:
        """Sizes and backend, for `print(model)`."""
        name = f"{self.prefix}, " if self.prefix else ""
        return f"{name}{self.spec}, backend={self.backend.get_name()}"
