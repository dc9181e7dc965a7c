"""Kernels for a GPU that this machine does not have: `attnlib compile`.

described      the server and its layers; runs `warmup` on them without launching
compilation    compiles what that needs into a folder with a manifest
"""

from __future__ import annotations

from attnlib.ahead_of_time.compilation import StoredKernel, compile_kernels
from attnlib.ahead_of_time.described import (
    DescribedLayer,
    DescribedServer,
    check_described,
    described_layers,
    needed_kernels,
)

__all__ = [
    "DescribedLayer",
    "DescribedServer",
    "StoredKernel",
    "check_described",
    "compile_kernels",
    "described_layers",
    "needed_kernels",
]
