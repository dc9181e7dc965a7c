"""Report whether the Gluon kernels of the `triton` backend can be imported.

They are under `triton.experimental`, and the portable Triton kernels replace them if they cannot be
imported. Results stay correct, only slower, so nothing else would report it. The check imports
triton.
"""

from __future__ import annotations

from attnlib.backends.base import AttentionBackend
from attnlib.device import DeviceInfo

__all__ = ["gluon_remarks"]


def gluon_remarks(backend: type[AttentionBackend], device: DeviceInfo) -> list[str]:
    """One line for the `triton` backend on a Hopper GPU, with the reason if it cannot use Gluon."""
    from attnlib.backends.triton import TritonBackend

    if (
        not issubclass(backend, TritonBackend)
        or device.type != "cuda"
        or device.is_rocm
        or (device.capability or (0, 0))[0] != 9
    ):
        return []
    if backend.config.get("kernels") == "portable":
        return ["uses the portable Triton kernels only (configured: kernels=portable)"]
    from attnlib.ops.triton.hopper import import_error

    reason = import_error()
    if reason is None:
        return [
            "Hopper kernels (Gluon) can be imported; attnlib explain shows which layers use them"
        ]
    why = reason.splitlines()[0]
    return [
        f"Hopper kernels (Gluon) cannot be imported ({why}): all calls use the slower portable "
        f"Triton kernels; install triton 3.6 to 3.9"
    ]
