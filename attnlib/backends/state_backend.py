"""What a backend says about state layers; every `AttentionBackend` has these members.

A backend of state layers needs `state_capabilities` and `get_state_impl_cls`. One that serves only
state layers defines no `get_impl_cls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from attnlib.backends.state_impl import StateImpl
from attnlib.capabilities import StateCapabilities, chosen_form, unsupported_reasons
from attnlib.device import DeviceInfo
from attnlib.errors import UnsupportedConfigError
from attnlib.metadata.states import StateMetadataBuilder
from attnlib.spec import StateSpec

__all__ = ["StateBackend"]


class StateBackend:
    """The part of the interface of a backend that serves state layers.

    Attributes:
        state_capabilities: the supported features of state layers; by default none is.
        config: settings from the registration, passed to the builder and every impl.
    """

    state_capabilities: ClassVar[StateCapabilities] = StateCapabilities()
    config: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def get_state_impl_cls() -> type[StateImpl]:
        """The implementation class of state layers, instantiated per layer."""
        raise UnsupportedConfigError(
            "this backend serves no state layers: define get_state_impl_cls and state_capabilities"
        )

    @classmethod
    def supports_state_combination(cls, spec: StateSpec, device: DeviceInfo) -> list[str]:
        """Reasons against combinations of features, which single capabilities cannot express.

        Returns:
            The reasons; empty if `spec` has no unsupported combination.
        """
        return []

    @classmethod
    def state_reasons(cls, spec: StateSpec, device: DeviceInfo) -> list[str]:
        """All reasons why the backend does not support a state layer; empty if it does."""
        reasons = unsupported_reasons(spec, device, cls.state_capabilities)
        return reasons or list(cls.supports_state_combination(spec, device))

    @classmethod
    def explain_state_lines(cls, spec: StateSpec, device: DeviceInfo) -> list[str]:
        """Lines that `explain` prints for an accepted backend: by default the form of a slot."""
        chosen = cls.resolve_state_spec(spec)
        chunks = f", chunks of {chosen.chunk_size} tokens" if chosen.form == "tail" else ""
        lines = [f"slots:   {chosen.form}{chunks}"]
        if spec.has_recurrence and spec.has_convolution:
            launches = "one launch for decodes" if cls.state_capabilities.fused_step else "separate"
            lines.append(f"step:    {launches}, with convolution, gates and norm")
        return lines

    @classmethod
    def resolve_state_spec(cls, spec: StateSpec) -> StateSpec:
        """A supported spec with the form and the chunk size that this backend chooses (T9)."""
        caps = cls.state_capabilities
        return spec.replace(
            form=chosen_form(spec, caps), chunk_size=spec.chunk_size or caps.default_chunk_size
        )

    @classmethod
    def make_state_builder(
        cls, spec: StateSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> StateMetadataBuilder:
        """A builder for state layers, which `make_builder` returns for a `StateSpec`."""
        settings = {**kwargs, "config": cls.config, "capabilities": cls.state_capabilities}
        return StateMetadataBuilder(spec, device, **settings)
