"""All reasons why a backend with some capabilities does not support a layer on a device."""

from __future__ import annotations

from collections.abc import Mapping

from attnlib.capabilities.checks import CHECKS
from attnlib.capabilities.declaration import NOT_STATED, Capabilities, Declaration
from attnlib.capabilities.predicates import Check, Reason, not_stated
from attnlib.capabilities.state_checks import STATE_CHECKS
from attnlib.capabilities.state_declaration import StateCapabilities
from attnlib.device import DeviceInfo
from attnlib.spec import LayerSpec, StateSpec

__all__ = ["serves_kind", "unsupported_device_reasons", "unsupported_reasons"]


def unsupported_device_reasons(device: DeviceInfo, caps: Declaration) -> list[str]:
    """Why the device is not supported; empty if it is."""
    if caps.devices is NOT_STATED:
        return [not_stated("devices")]
    if device.type not in caps.devices:
        return [f"device {device.type} not supported (supported: {', '.join(caps.devices)})"]
    if device.type != "cuda":
        return []
    if device.is_rocm:
        return [] if caps.rocm else ["ROCm devices: not supported"]
    if device.capability is None:
        unbounded = caps.min_capability is None and caps.max_capability is None
        return [] if unbounded else ["the compute capability of the device is unknown"]
    reasons = []
    if caps.min_capability is not None and device.capability < caps.min_capability:
        reasons.append(
            f"compute capability {_dotted(device.capability)} is below "
            f"{_dotted(caps.min_capability)}"
        )
    if caps.max_capability is not None and device.capability > caps.max_capability:
        reasons.append(
            f"compute capability {_dotted(device.capability)} is above "
            f"{_dotted(caps.max_capability)}"
        )
    return reasons


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def serves_kind(spec: LayerSpec, caps: Capabilities | StateCapabilities) -> bool:
    """Whether a backend with these capabilities serves any layer of the kind of `spec`."""
    unstated = caps.devices is NOT_STATED if isinstance(spec, StateSpec) else caps == Capabilities()
    return not unstated


def unsupported_reasons(
    spec: LayerSpec, device: DeviceInfo, caps: Capabilities | StateCapabilities
) -> list[str]:
    """All reasons why a backend with these capabilities does not support `spec` on `device`.

    Args:
        spec: an `AttentionSpec` with `Capabilities`, or a `StateSpec` with `StateCapabilities`.
        device: facts about the device.
        caps: what the backend declares for this kind of layers.
    """
    if not serves_kind(spec, caps):
        return [f"serves no {spec.kind} layers"]
    reasons = unsupported_device_reasons(device, caps)
    checks: Mapping[str, Check] = STATE_CHECKS if isinstance(spec, StateSpec) else CHECKS
    for field, check in checks.items():
        reason = check(spec, caps)
        if reason is not None and reason not in reasons:
            reasons.append(Reason(reason, field))
    return reasons
