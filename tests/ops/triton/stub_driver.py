"""Triton's own launcher objects, and attnlib's launcher in C, over a driver that records.

Triton's `CudaLauncher` runs with stubs for the function that it compiles and for the encoder of TMA
descriptors. attnlib's launches (`attnlib.ops.triton.launch.driver`) run in C as they are, over a
stub for `cuLaunchKernelEx` that reads the arguments back. Both need a Triton release for which
attnlib has direct launches (`HAS_DIRECT`).
"""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from attnlib.ops.triton.launch import driver as launches

__all__ = [
    "BY_TRITON",
    "DRIVER",
    "ENCODED",
    "HAS_DIRECT",
    "RECORDS",
    "Driver",
    "Record",
    "StandIn",
    "replace_launcher",
]

FUNCTION, PACKED = 7, (4, 1, 0)
OLD, NEW = triton.__version__.startswith("3.6."), triton.__version__.startswith("3.9.")
HAS_DIRECT = OLD or NEW


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
        """An encoded descriptor: the index in `DESCRIPTORS` of all that it was made of."""
        ENCODED.append(pointer)
        known = (tuple(fact) if isinstance(fact, list) else fact for fact in facts)
        DESCRIPTORS.append(("encoded", pointer, *known))
        return len(DESCRIPTORS) - 1

    fill_tma_descriptor_tiled = fill_tma_descriptor


def launch_of_3_6(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
    """What each kernel of Triton 3.6 compiles for itself."""
    (cooperative, pdl, scratch, profile), hooks, values = rest[:4], rest[4:8], rest[8:]
    take(function, (x, y, z), stream, (cooperative, pdl), hooks, (scratch, profile), values)


class Handle(int):
    """The driver's handle of a kernel."""

    key: str
    kinds: bytes


HANDLES: dict[int, Handle] = {}
DESCRIPTORS: list[Any] = []
"""Encoded descriptors, which are passed as their numbers here."""


def take(
    function: Handle, grid: Any, stream: int, flags: Any, hooks: Any, scratch: Any, values: Any
) -> None:
    """Record a launch by Triton: the arguments that it passes to the kernel."""
    packed, info, enter, leave = hooks
    assert packed == PACKED and info is None and scratch == (None, None)
    hooked = bool(getattr(enter, "calls", None) or getattr(leave, "calls", None))
    plain = tuple(
        _passed(value.data_ptr() if isinstance(value, torch.Tensor) else value, kind)
        for value, kind in zip(values, function.kinds, strict=False)
        if kind != ord("x")
    )
    RECORDS.append(Record(function.key, grid, stream, (*flags, hooked), plain))


def _passed(value: Any, kind: int) -> Any:
    """The value that the kernel gets."""
    if kind == ord("p"):
        return value or 0
    if kind == ord("f"):
        return struct.unpack("f", struct.pack("f", value))[0]
    if kind == ord("t"):
        return DESCRIPTORS[value]
    return value if kind == ord("d") else int(value)


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "one", "too", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


READ = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
def launch_kernel(config: Any, function: int, parameters: Any, extra: Any) -> int:
    """`cuLaunchKernelEx`: records a launch by attnlib."""
    given, handle = config.contents, HANDLES[function]
    assert (given.threads, given.one, given.too, given.shared) == (32 * PACKED[0], 1, 1, 0)
    ids = [ctypes.c_int.from_address(given.attributes + 72 * number).value
           for number in range(given.num_attributes)]  # fmt: skip
    values: list[Any] = []
    kinds = handle.kinds.replace(b"x", b"").decode()
    for number, kind in enumerate(kinds):
        word = ctypes.c_uint64.from_address(parameters[number]).value
        if kind == "p":
            values.append(word)
        elif kind == "t":
            values.append(DESCRIPTORS[word])
        else:
            values.append(READ[kind].from_address(parameters[number]).value)
    for scratch in range(len(kinds), len(kinds) + 2):
        assert ctypes.c_uint64.from_address(parameters[scratch]).value == 0
    cooperative, pdl = 2, 6  # CU_LAUNCH_ATTRIBUTE_...
    flags = (cooperative in ids, pdl in ids, False)
    grid = (given.x, given.y, given.z)
    RECORDS.append(Record(handle.key, grid, given.stream or 0, flags, tuple(values)))
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def no_context(found: int) -> int:
    """`cuCtxGetCurrent` and `cuCtxSetCurrent`."""
    return 0


ADDRESSES = tuple(
    ctypes.cast(function, ctypes.c_void_p).value
    for function in (launch_kernel, no_context, no_context)
)


def new_launch() -> Any:
    """As `attnlib.ops.triton.launch.driver.new_launch`; descriptors are passed as numbers."""

    def create(function: Handle, sizes: Any, kinds: bytes, slots: Any, values: Any) -> Any:
        assert kinds == function.kinds[: len(kinds)] and set(function.kinds[len(kinds) :]) <= {120}
        return launches.compile_native().Launch(
            ADDRESSES, function, sizes, kinds.replace(b"t", b"p"), slots, values
        )

    return create


def replace_launcher() -> None:
    """Make Triton's launcher objects end in `take`, and attnlib's launches in `launch_kernel`."""
    launches.new_launch = new_launch
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
        self.src = SimpleNamespace(constants={}, signature=signature)
        self.run = nvidia.CudaLauncher(self.src, self.metadata)
        self.function, self.packed_metadata = Handle(1000 + len(HANDLES)), PACKED
        self.function.key = key
        self.function.kinds = launches._kinds(list(signature.values()), True) or b""
        HANDLES[self.function] = self.function

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
    """One device, current where `device` is -1, whose current stream is `stream`."""

    def __init__(self) -> None:
        self.stream, self.device = 0, -1
        self.utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, index: int) -> int:
        assert index == -1
        return self.stream


DRIVER = Driver()
