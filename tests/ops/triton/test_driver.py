"""Direct launches: what `native.c` passes to `cuLaunchKernelEx`."""

from __future__ import annotations

import ctypes
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from attnlib.ops.triton.launch import driver
from attnlib.ops.triton.launch.driver import CHANGES

pytest.importorskip("triton.backends.nvidia.driver", reason="needs Triton's NVIDIA backend")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("gcc", "clang"))), reason="needs a C compiler, as Triton does"
)

KERNEL = 0x1234
INVALID_CONTEXT = 201


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class Driver:
    """The three driver functions, recording.

    Attributes:
        sizes: bytes to read of each kernel parameter, scratch pointers included.
        launches: of each call, the function, configuration and parameters as bytes.
        results: what the next launches return; 0 when empty.
        contexts: the contexts that were made current.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.launches: list[tuple[Any, ...]] = []
        self.results: list[int] = []
        self.contexts: list[int] = []

        @ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
        )  # fmt: skip
        def launch(config: Any, function: int, parameters: Any, extra: Any) -> int:
            given = config.contents
            ids = tuple(
                ctypes.c_int.from_address(given.attributes + 72 * n).value
                for n in range(given.num_attributes)
            )
            sizes = (*given.grid, *given.block, given.shared)
            values = tuple(ctypes.string_at(parameters[n], s) for n, s in enumerate(self.sizes))
            self.launches.append((function, sizes, given.stream or 0, ids, values))
            return self.results.pop(0) if self.results else 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
        def get_context(found: Any) -> int:
            found[0] = 77
            return 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        def set_context(context: int) -> int:
            self.contexts.append(context)
            return 0

        self._functions = (launch, get_context, set_context)

    @property
    def addresses(self) -> tuple[int | None, ...]:
        """Of the three functions."""
        return tuple(ctypes.cast(f, ctypes.c_void_p).value for f in self._functions)


@pytest.fixture
def native() -> Any:
    """The compiled module."""
    return driver.compile_native()


@pytest.fixture
def recorder(native: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver that records what `DirectLaunch` launches."""
    recording = Driver()

    def create(*arguments: Any) -> Any:
        return native.Launch(recording.addresses, *arguments)

    monkeypatch.setattr(driver, "new_launch", lambda: create)
    yield recording


def direct(kinds: bytes, **changes: Any) -> driver.DirectLaunch:
    """A kernel of 4 warps with 64 bytes of shared memory."""
    values: dict[str, Any] = {"threads": 128, "shared": 64, "cooperative": False, "pdl": False}
    return driver.DirectLaunch(KERNEL, kinds=kinds, **(values | changes))


def test_every_kind_of_argument(recorder: Driver) -> None:
    """Changing arguments fill their places; compile-time
    arguments are not passed, and two null scratch pointers end the list."""
    recorder.sizes = [8, 8, 4, 8, 4, 8, 4, 8, 8]
    launch = direct(b"ppilxfdi").bind(
        (7, 2, 1), (CHANGES, 0x10, -5, CHANGES, CHANGES, CHANGES, 2.5, 1 << 31)
    )
    launch(99, 0xFFFF_0000_0000_0010, 1 << 40, None, 0.1)
    (function, sizes, stream, ids, values) = recorder.launches[0]
    assert (function, sizes, stream, ids) == (KERNEL, (7, 2, 1, 128, 1, 1, 64), 99, ())
    assert values == tuple(
        struct.pack(f"<{kind}", value)
        for kind, value in zip(
            "QQiqfdIQQ", (0xFFFF_0000_0000_0010, 0x10, -5, 1 << 40, 0.1, 2.5, 1 << 31, 0, 0),
            strict=True,
        )
    )  # fmt: skip


def test_null_pointers_and_attributes(recorder: Driver) -> None:
    """None is a null pointer; both launch attributes are passed on."""
    recorder.sizes = [8]
    direct(b"p", pdl=True, cooperative=True).bind((1, 1, 1), (CHANGES,))(0, None)
    assert recorder.launches[0][3:] == ((6, 2), (bytes(8),))


def test_descriptors_are_passed_by_value(native: Any, recorder: Driver) -> None:
    """The last 128 bytes of an encoded descriptor are the parameter."""

    class Encoded:
        __slots__ = tuple(f"word_{n}" for n in range(16))

    native.use_tensor_map_type(Encoded)
    recorder.sizes = [128, 4]
    encoded = Encoded()
    encoded.word_0 = encoded.word_15 = "content"
    launch = direct(b"ti").bind((1, 1, 1), (CHANGES, 3))
    launch(0, encoded)
    content = ctypes.string_at(id(encoded) + Encoded.__basicsize__ - 128, 128)
    assert recorder.launches[0][4] == (content, struct.pack("<i", 3)) and any(content)
    with pytest.raises(TypeError, match="must be an encoded .*Encoded, not int"):
        launch(0, 5)


def test_bad_arguments_are_refused(recorder: Driver) -> None:
    """A wrong number, type or range of arguments launches nothing."""
    launch = direct(b"pif").bind((1, 1, 1), (CHANGES,) * 3)
    for given, error in (
        ((0, 1), TypeError), ((0, 1, 2, 3.0, 4), TypeError), ((0, "x", 2, 3.0), TypeError),
        ((0, 1, 1 << 33, 3.0), OverflowError), ((0, -1, 2, 3.0), OverflowError),
        ((0, 1, 2, "x"), TypeError), (("x", 1, 2, 3.0), TypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            launch(*given)
    with pytest.raises(ValueError, match="at most 128"):
        direct(b"i" * 129).bind((1, 1, 1), (CHANGES,) * 129)
    with pytest.raises(ValueError, match="unknown kind"):
        direct(b"?").bind((1, 1, 1), (1,))
    with pytest.raises(ValueError, match="5 descriptors; at most 4"):
        direct(b"ttttt").bind((1, 1, 1), (CHANGES,) * 5)
    assert not recorder.launches


def test_driver_errors(recorder: Driver) -> None:
    """Errors name the driver's number. A thread without a context gets the one of the binding."""
    launch = direct(b"p").bind((1, 1, 1), (CHANGES,))
    recorder.results = [719]
    with pytest.raises(RuntimeError, match="CUDA driver error 719"):
        launch(0, 16)
    recorder.results = [INVALID_CONTEXT]
    launch(0, 16)
    assert recorder.contexts == [77] and len(recorder.launches) == 3


def test_threads_do_not_mix_arguments(recorder: Driver) -> None:
    """Launches of one object from several threads pass their own arguments."""
    recorder.sizes = [8, 8]
    launch = direct(b"pp").bind((1, 1, 1), (CHANGES,) * 2)

    def run(first: int) -> None:
        for _ in range(300):
            launch(first, first, first)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.launches) == 1200
    for _, _, stream, _, values in recorder.launches:
        assert values == (struct.pack("<Q", stream),) * 2


def test_types_without_a_kind_are_left_to_triton() -> None:
    """Half-precision scalars, tuples and descriptors that are not encoded have no kind."""
    kinds: Callable[[list[Any], bool], bytes | None] = driver._kinds
    assert kinds(["*bf16", "tensordesc<bf16[1, 64],L>", "constexpr", "fp32"], True) == b"ptiillxf"
    assert kinds(["fp16"], True) is kinds([("i32",)], True) is None
    assert kinds(["tensordesc<bf16[1,64]>"], False) is None


@pytest.mark.parametrize(
    ("version", "direct"),
    [("3.5.1", False), ("3.6.0", True), ("3.7.0", False), ("3.9.0+git", True), ("main", False)],
)
def test_other_versions_are_left_to_triton(
    monkeypatch: pytest.MonkeyPatch, version: str, direct: bool
) -> None:
    """Internals of Triton move between versions: only tested ones are launched directly."""
    parts = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": 1}
    launcher = type("CudaLauncher", (), {**parts, "launch_cooperative_grid": 0, "__call__": None})
    compiled = SimpleNamespace(
        run=launcher(), function=KERNEL, packed_metadata=(4, 1, 64),
        metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda"), tensordesc_meta=None),
        src=SimpleNamespace(signature={"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}),
    )  # fmt: skip
    monkeypatch.setattr(driver, "new_launch", lambda: Driver)
    monkeypatch.setattr("triton.__version__", version)
    found = driver.direct_launch(compiled, 2)
    expected = driver.DirectLaunch(KERNEL, 128, 64, False, True, b"pi", None, "[]")
    assert found == (expected if direct else None)
    compiled.packed_metadata = (4, 2, 64)
    assert driver.direct_launch(compiled, 2) is None, "clusters"
    launcher.global_scratch_size = 8
    compiled.packed_metadata = (4, 1, 64)
    assert driver.direct_launch(compiled, 2) is None, "scratch memory"
