"""Whether the Gluon kernels of the `triton` backend can be imported here: they live under `triton.experimental`, and every call works without them.

A batch that comes out right says nothing about it, because plain Triton serves what Gluon cannot; so the doctor asks. Asking imports triton, in the
process that just ran a kernel of the backend.
"""

from __future__ import annotations

from attnlib.backends.base import AttentionBackend
from attnlib.device import DeviceInfo

__all__ = ["gluon_remarks"]


def gluon_remarks(backend: type[AttentionBackend], device: DeviceInfo) -> list[str]:
    """One line for a backend with attnlib's own kernels on a Hopper chip, none elsewhere: which of its kernels serve, and why not Gluon's."""
    from attnlib.backends.triton import TritonBackend

    if (
        not issubclass(backend, TritonBackend)
        or device.type != "cuda"
        or device.is_rocm
        or (device.capability or (0, 0))[0] != 9
    ):
        return []
    if backend.config.get("kernels") == "portable":
        return ["plain Triton kernels serve every call (kernels=portable)"]
    from attnlib.ops.triton.hopper.loader import hopper_missing

    reason = hopper_missing()
    if reason is None:
        return [
            "the Gluon kernels for SM90 can be imported; attnlib explain says which layers they serve"
        ]
    why = reason.splitlines()[0]
    return [
        f"the Gluon kernels for SM90 cannot be imported ({why}): plain Triton kernels serve every call, slower; install triton 3.6 to 3.9"
    ]
