"""Limits of NVIDIA GPUs that this machine does not have, by name or compute capability."""

from __future__ import annotations

from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.device import DeviceLimits

__all__ = ["described_limits"]

_KB = 1024
_SHARED = {
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
    (10, 3): (227, 228),
    (12, 0): (99, 100),
}
"""Compute capability -> KB of shared memory per CTA and per multiprocessor."""
_SMS = {
    "A100": 108,
    "A800": 108,
    "A30": 56,
    "A10": 72,
    "A10G": 80,
    "A40": 84,
    "L4": 58,
    "L40": 142,
    "L40S": 142,
    "H100": 132,
    "H100 PCIE": 114,
    "H200": 132,
    "H800": 132,
    "GH200": 132,
    "H20": 78,
    "B200": 148,
}
"""Model -> multiprocessors."""
_SMS_OF = {(8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148}
"""Compute capability -> multiprocessors of its largest model in wide use."""


def described_limits(device: DeviceInfo, num_sms: int | None = None) -> DeviceLimits:
    """Limits of a GPU of another machine.

    Args:
        device: facts about it.
        num_sms: its multiprocessors; None for those of the model, or of the capability's usual one.

    Raises:
        ContractError: a CPU, an AMD GPU, or a GPU whose numbers are not known.
    """
    shared = _SHARED.get(device.capability or (0, 0))
    if device.is_rocm or shared is None:
        known = ", ".join(f"sm_{major}{minor}" for major, minor in _SHARED)
        raise ContractError(
            f"device={device} is not an NVIDIA GPU whose shared memory is known: use one of "
            f"{known}, or run attnlib.warmup on the machine itself"
        )
    capability = device.capability
    assert capability is not None  # it is in `_SHARED`
    count = num_sms or (_sms_by_name(device.name) if device.name else _SMS_OF.get(capability))
    if count is None:
        raise ContractError(
            f"the number of multiprocessors of {device} is not known: give --num-sms "
            "(torch.cuda.get_device_properties(0).multi_processor_count on that machine)"
        )
    per_cta, per_sm = shared
    return DeviceLimits(
        num_sms=count,
        shared_memory=per_cta * _KB,
        shared_memory_per_sm=per_sm * _KB,
        capability=capability,
        has_fp8=capability >= (8, 9),
        name=device.name,
    )


def _sms_by_name(name: str) -> int | None:
    """Multiprocessors by the driver's name: "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB"."""
    words = name.upper().removeprefix("NVIDIA ").replace("-", " ").split()
    return _SMS.get(" ".join(words[:2])) or _SMS.get(words[0])
