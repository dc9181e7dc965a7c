"""State layers in the coverage of a run: the capabilities that a spec uses and a backend declares.

Names have the prefix "states.", such as "states.updates:delta".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnlib.capabilities import NOT_STATED, StateCapabilities
from attnlib.device import resolve_device
from attnlib.spec import CudaGraphSupport, StateSpec
from attnlib.testing.outcome import UnsupportedCase

if TYPE_CHECKING:
    from attnlib.testing.backend_under_test import BackendUnderTest

__all__ = ["check_state_supported", "declared_state_features", "state_uses"]

_LISTED = ("devices", "dtypes", "state_dtypes", "updates", "decays", "conv_activations", "forms")
_FLAGS = ("beta", "skip", "qk_norm", "conv_bias", "batch_invariant")


def check_state_supported(target: BackendUnderTest, spec: StateSpec) -> None:
    """Check the declaration of a backend.

    Raises:
        UnsupportedCase: the backend declares that it does not support the spec.
    """
    reasons = target.backend.state_reasons(spec, resolve_device(target.device))
    if reasons:
        raise UnsupportedCase(reasons)


def state_uses(spec: StateSpec, device_type: str) -> tuple[str, ...]:
    """The capabilities that a spec with a form uses."""
    uses = [f"devices:{device_type}", f"dtypes:{_text(spec.dtype)}"]
    if spec.form is not None:
        uses.append(f"forms:{spec.form}")
    if spec.has_recurrence:
        uses += [
            f"state_dtypes:{_text(spec.state_dtype)}",
            f"updates:{spec.update}",
            f"decays:{spec.decay}",
        ]
    if spec.has_convolution:
        uses.append(f"conv_activations:{spec.conv_activation or 'none'}")
    flags = {
        "beta": spec.has_beta and spec.has_recurrence,
        "skip": spec.has_skip,
        "qk_norm": spec.qk_norm,
        "conv_bias": spec.has_conv_bias,
        "batch_invariant": spec.batch_invariant,
        "max_rollback": spec.max_rollback > 0,
        f"cudagraph:{spec.cudagraph.name}": spec.cudagraph is not CudaGraphSupport.NEVER,
    }
    used = (*uses, *(name for name, needed in flags.items() if needed))
    return tuple(f"states.{name}" for name in used)


def declared_state_features(caps: StateCapabilities) -> tuple[list[str], list[str], list[str]]:
    """(supported, not supported, not stated) of a backend that serves state layers, in the notation
    of `state_uses`; nothing of one that does not."""
    supported: list[str] = []
    unsupported: list[str] = []
    unstated: list[str] = []
    if caps.devices is NOT_STATED:
        return supported, unsupported, unstated
    for name in (*_LISTED, *_FLAGS, "max_rollback", "cudagraph"):
        value = getattr(caps, name)
        if value is NOT_STATED:
            unstated.append(name)
        elif name in _LISTED:
            supported += [f"{name}:{_text(entry)}" for entry in value]
        elif name == "cudagraph":
            levels = (each for each in CudaGraphSupport if CudaGraphSupport.NEVER < each <= value)
            supported += [f"cudagraph:{level.name}" for level in levels]
        else:
            (supported if value else unsupported).append(name)
    found = (supported, unsupported, unstated)
    return tuple([f"states.{name}" for name in names] for names in found)  # type: ignore[return-value]


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")
