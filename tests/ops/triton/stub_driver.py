"""Triton's own launcher objects with a driver that records.

For Triton releases whose launchers attnlib calls directly (`attnlib.ops.triton.launch.driver`), the
real `CudaLauncher` runs, with stubs for the function that it compiles and for the encoder of TMA
descriptors. For other releases a stub replaces the launcher.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

__all__ = [
    "BY_TRITON",
    "DRIVER",
    "ENCODED",
    "RECORDS",
    "REAL_LAUNCHER",
    "Driver",
    "Record",
    "StandIn",
    "replace_launcher",
]

FUNCTION, PACKED = 7, (4, 1, 0)
OLD, NEW = triton.__version__.startswith("3.6."), triton.__version__.startswith("3.9.")
REAL_LAUNCHER = OLD or NEW


class Record(NamedTuple):
    """One launch: Triton's key of the kernel, grid, stream, attributes, and arguments."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    attributes: tuple[Any, ...]
    arguments: tuple[Any, ...]


RECORDS: list[Record] = []
BY_TRITON: list[str] = []
"""Kernels launched through `JITFunction.run`, in order."""
ENCODED: list[int] = []
"""The addresses of which TMA descriptors were encoded, in order."""


class Argument(NamedTuple):
    """What Triton 3.9 notes of one argument."""

    nested_tuple: Any
    type: int


class Utils:
    """The functions in C."""

    def launch(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        """What all kernels of Triton 3.9 are launched by."""
        (
            cooperative,
            pdl,
            metadata,
            info,
            enter,
            leave,
            scratch,
            profile,
            annotations,
            signature,
            values,
        ) = rest
        assert len(annotations) == len(values) and signature == tuple(
            sign for sign in signature if sign != "constexpr"
        )
        kept = [value for value, note in zip(values, annotations, strict=True) if note.type != 2]
        assert len(kept) == len(signature)
        take(
            function,
            (x, y, z),
            stream,
            (cooperative, pdl),
            (metadata, info, enter, leave),
            (scratch, profile),
            values,
        )

    def build_signature_metadata(self, signature: Any) -> tuple[str, ...]:
        return tuple(signature)

    def fill_tma_descriptor(self, pointer: int, *facts: Any) -> tuple[Any, ...]:
        """An encoded descriptor; it bears all that it was made of."""
        ENCODED.append(pointer)
        return (
            "encoded",
            pointer,
            *(tuple(fact) if isinstance(fact, list) else fact for fact in facts),
        )

    fill_tma_descriptor_tiled = fill_tma_descriptor


def launch_of_3_6(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
    """What each kernel of Triton 3.6 compiles for itself."""
    (cooperative, pdl, scratch, profile), hooks, values = rest[:4], rest[4:8], rest[8:]
    take(function, (x, y, z), stream, (cooperative, pdl), hooks, (scratch, profile), values)


def take(
    function: Any, grid: Any, stream: int, flags: Any, hooks: Any, scratch: Any, values: Any
) -> None:
    """Record a launch."""
    packed, info, enter, leave = hooks
    assert packed == PACKED and info is None and scratch == (None, None)
    hooked = bool(getattr(enter, "calls", None) or getattr(leave, "calls", None))
    plain = tuple(
        value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values
    )
    RECORDS.append(Record(function.key, grid, stream, (*flags, hooked), plain))


class CudaLauncher:
    """In the place of Triton's launcher object in other releases."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self.launch_pdl = metadata.launch_pdl

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        take(
            function, (x, y, z), stream, (False, self.launch_pdl), rest[:4], (None, None), rest[4:]
        )

    launch = __call__


def replace_launcher() -> None:
    """Make Triton's launcher objects end in `take`."""
    if OLD:
        nvidia.library_dirs = lambda: []
        nvidia.compile_module_from_src = lambda **source: SimpleNamespace(launch=launch_of_3_6)
    elif NEW:
        nvidia.PyKernelArg, nvidia.ARG_TUPLE, nvidia.ARG_KERNEL, nvidia.ARG_CONSTEXPR = (
            Argument,
            0,
            1,
            2,
        )


class StandIn:
    """In the place of a compiled kernel."""

    def __init__(self, key: str, signature: dict[str, Any], launch_pdl: bool) -> None:
        described = [
            text
            for text in signature.values()
            if isinstance(text, str) and text.startswith("tensordesc")
        ]
        self.metadata = SimpleNamespace(
            target=GPUTarget("cuda", 90, 32),
            tensordesc_meta=[_map(text) for text in described],
            launch_pdl=launch_pdl,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            num_ctas=1,
            launch_cooperative_grid=False,
            instrumentation_mode="",
        )
        make: Any = nvidia.CudaLauncher if REAL_LAUNCHER else CudaLauncher
        self.run = make(SimpleNamespace(constants={}, signature=signature), self.metadata)
        self.function, self.packed_metadata = SimpleNamespace(key=key), PACKED

    def launch_metadata(self, grid: Any, stream: int, *args: Any) -> None:
        return None


def _map(text: str) -> dict[str, Any]:
    """What the compiler tells of a descriptor parameter, here by its type alone."""
    shape = [int(size) for size in text[text.index("[") + 1 : text.index("]")].split(",")]
    kind = 6 if "fp16" in text and "bf16" not in text else 10
    return {
        "swizzle": 3,
        "elem_size": 2,
        "elem_type": kind,
        "block_size": shape,
        "fp4_padded": False,
    }


class Driver:
    """One device whose current stream is `stream`."""

    def __init__(self) -> None:
        self.stream = 0
        self.utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, index: int) -> int:
        assert index == -1
        return self.stream


DRIVER = Driver()
