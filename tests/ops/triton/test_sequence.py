"""All launches of a call at once: what `sequence.c` passes to each launch, and when it refuses."""

from __future__ import annotations

import ctypes
import shutil
import struct
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.ops.triton.launch import driver, sequence
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY,
    KEY_CACHE,
    KEY_MAP,
    LSE,
    NUM_VALUES,
    OUT,
    QUERY,
    SLOPES,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Lookup,
    Part,
    Source,
    Step,
    batch_sources,
    prepare_sequence,
    score_sources,
)
from tests.ops.triton.test_driver import Driver, direct

pytest.importorskip("triton.backends.nvidia.driver", reason="needs Triton's NVIDIA backend")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("gcc", "clang"))), reason="needs a C compiler, as Triton does"
)

INTERFACE = "__dlpack_c_exchange_api__"
FIXED = {source: None for source in map(Source, range(NUM_VALUES)) if source > LSE}


class Machine:
    """A driver that records launches, and what a sequence asks before it launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver, self.device, self.stream, self.observed = Driver(), 0, 5, False
        create = driver.compile_native().Launch
        monkeypatch.setattr(
            driver, "new_launch", lambda: lambda *given: create(self.driver.addresses, *given)
        )
        monkeypatch.setattr(sequence, "launches_observed", lambda: self.observed)
        chips = SimpleNamespace(current_device=lambda: self.device)
        monkeypatch.setattr(sequence, "chips", chips)
        active = SimpleNamespace(get_current_stream=lambda index: self.stream + index)
        runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
        monkeypatch.setattr(sequence, "triton", SimpleNamespace(runtime=runtime))

    def words(self, number: int) -> tuple[int, ...]:
        """The parameters of a launch as words, without the scratch pointers."""
        values: tuple[bytes, ...] = self.driver.launches[number][4]
        return tuple(struct.unpack("<Q", value)[0] for value in values)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A recording machine."""
    return Machine(monkeypatch)


def launch(kinds: bytes, sources: tuple[Source, ...], *fixed: Any) -> Step:
    """A kernel that takes `sources`, then fixed arguments."""
    arguments = (*(driver.CHANGES for _ in sources), *fixed)
    return Step(direct(kinds).bind((1, 1, 1), arguments), sources)


def tensors(count: int = 5) -> list[torch.Tensor]:
    """Tensors at aligned addresses."""
    return [torch.zeros(64, dtype=torch.float32) for _ in range(count)]


def bound(machine: Machine) -> Callable[..., bool]:
    """One launch of the first five tensors."""
    machine.driver.sizes = [8] * 5
    step = launch(b"p" * 5, (QUERY, KEY_CACHE, VALUE_CACHE, OUT, LSE))
    return prepare_sequence([Part(Launches((step,)))], 0, NUM_VALUES, FIXED).bind(())


def test_launches_in_order_with_offsets(machine: Machine) -> None:
    """Two launches on the current stream; the rows of the second begin further behind; None stays
    a null pointer, and values that do not change are converted to the kind of the argument."""
    first = launch(b"ppp", (OUT, LSE, QUERY))
    second = launch(b"pppf", (OUT, LSE, QUERY, K_SCALE))
    rows = {QUERY: 32, OUT: 64, LSE: 4}
    parts = [Part(Launches((first,))), Part(Launches((second,)), rows)]
    run = prepare_sequence(parts, 0, NUM_VALUES, {**FIXED, K_SCALE: 0.5}).bind(())
    machine.driver.sizes = [8, 8, 8]
    query, key, value, out, lse = tensors()
    assert run(query, key, value, out, lse) is True
    q, o, s = query.data_ptr(), out.data_ptr(), lse.data_ptr()
    assert machine.words(0) == (o, s, q) and machine.words(1) == (o + 64, s + 4, q + 32)
    assert [given[2] for given in machine.driver.launches] == [5, 5]
    machine.driver.sizes = [8, 8, 8, 4]
    machine.stream = 9
    assert run(query, key, value, out, None)
    assert machine.driver.launches[3][2] == 9
    assert machine.driver.launches[3][4][1:] == (
        bytes(8), struct.pack("<Q", q + 32), struct.pack("<f", 0.5),
    )  # fmt: skip


def test_layer_tensors(machine: Machine) -> None:
    """Slopes, scales and score tensors are given behind the seven tensors of every call."""
    machine.driver.sizes = [8] * 3
    (score,) = score_sources(1)
    step = launch(b"ppp", (SLOPES, K_SCALE, score))
    fixed = {source: None for source in FIXED if source not in (SLOPES, K_SCALE)}
    run = prepare_sequence([Part(Launches((step,)))], 0, NUM_VALUES + 1, fixed).bind(())
    given = tensors(8)
    odd = torch.zeros(9)[1:]  # only the seven tensors must be aligned
    assert run(*given[:5], odd, *given[6:])
    assert machine.words(0) == (odd.data_ptr(), given[6].data_ptr(), given[7].data_ptr())


@pytest.mark.parametrize("number", range(4))
def test_unaligned_tensors_are_left_to_triton(machine: Machine, number: int) -> None:
    """False and no launch where Triton would choose another kernel."""
    run, given = bound(machine), tensors()
    given[number] = torch.zeros(65)[1:]
    assert run(*given) is False and not machine.driver.launches


def test_other_devices_and_hooks_are_left_to_triton(machine: Machine) -> None:
    """False and no launch while another device is current or launches are observed."""
    run, given = bound(machine), tensors()
    machine.device = 1
    assert run(*given) is False
    machine.device, machine.observed = 0, True
    assert run(*given) is False and not machine.driver.launches
    machine.observed = False
    assert run(*given) is True and len(machine.driver.launches) == 1


def test_descriptors_are_looked_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the addresses of the call, with the offset of its part; missing ones are encoded."""

    class Encoded:
        __slots__ = tuple(f"word_{n}" for n in range(16))

    driver.compile_native().use_tensor_map_type(Encoded)
    table: dict[Any, tuple[Any, ...]] = {}
    asked: list[tuple[int, ...]] = []

    def encode(*addresses: int) -> tuple[Any, ...]:
        asked.append(addresses)
        found = (Encoded(), Encoded()) if len(addresses) == 2 else (Encoded(),)
        found[0].word_15 = addresses
        table[addresses if len(addresses) == 2 else addresses[0]] = found
        return found

    query_map = Source(-3)
    lookups = (
        Lookup((KEY_CACHE, VALUE_CACHE), table, encode, (KEY_MAP, VALUE_MAP)),
        Lookup((QUERY,), table, encode, (query_map,)),
    )
    step = launch(b"ttt", (VALUE_MAP, KEY_MAP, query_map))
    parts = [Part(Launches((step,), lookups), {QUERY: 16})]
    run = prepare_sequence(parts, 0, NUM_VALUES, FIXED).bind(())
    machine.driver.sizes = [128] * 3
    given = tensors()
    for _ in range(2):
        assert run(*given)
    query, key, value = (tensor.data_ptr() for tensor in given[:3])
    assert asked == [(key, value), (query + 16,)]
    maps = (table[key, value][1], table[key, value][0], table[query + 16][0])
    content = tuple(ctypes.string_at(id(x) + Encoded.__basicsize__ - 128, 128) for x in maps)
    assert machine.driver.launches[1][4] == content
    table[key, value] = table[key, value][:1]
    with pytest.raises(TypeError, match="expected a tuple of 2 descriptors"):
        run(*given)


def test_descriptors_of_a_batch(machine: Machine) -> None:
    """A batch may give descriptors; its launches keep them alive."""

    class Encoded:
        __slots__ = tuple(f"word_{n}" for n in range(16))

    driver.compile_native().use_tensor_map_type(Encoded)
    step = launch(b"tp", batch_sources(2))
    template = prepare_sequence([Part(Launches((step,)))], 0, NUM_VALUES, FIXED, 2)
    given, address = Encoded(), 64
    given.word_15 = address
    references = sys.getrefcount(given)
    run = template.bind((given, address))
    assert sys.getrefcount(given) == references + 1
    machine.driver.sizes = [128, 8]
    assert run(*tensors())
    content = ctypes.string_at(id(given) + Encoded.__basicsize__ - 128, 128)
    assert machine.driver.launches[0][4] == (content, struct.pack("<Q", address))
    del run
    assert sys.getrefcount(given) == references
    with pytest.raises(TypeError, match="must be an encoded"):
        template.bind((3, address))


def test_errors(machine: Machine) -> None:
    """Wrong values and a failing driver raise; a failed first launch is the last one."""
    run, given = bound(machine), tensors()
    with pytest.raises(TypeError, match="expected 5 tensors, got 4 values"):
        run(*given[:4])
    with pytest.raises(AttributeError, match="data_ptr"):
        run(*given[:4], 3)
    machine.driver.results = [719]
    with pytest.raises(RuntimeError, match="CUDA driver error 719"):
        run(*given)
    number = launch(b"i", (KEY,))
    given_key = {source: None for source in FIXED if source != KEY}
    with pytest.raises(ValueError, match="cannot be an argument of kind 'i'"):
        prepare_sequence([Part(Launches((number,)))], 0, NUM_VALUES, given_key)
    with pytest.raises(TypeError, match=r"attnlib_native\.Launch"):
        prepare_sequence([Part(Launches((Step(print, ()),)))], 0, NUM_VALUES, FIXED)


def test_threads_do_not_mix_tensors(machine: Machine) -> None:
    """Calls from several threads pass their own tensors."""
    run = bound(machine)
    sets = [tensors() for _ in range(4)]

    def repeat(given: list[torch.Tensor]) -> None:
        for _ in range(200):
            run(*given)

    threads = [threading.Thread(target=repeat, args=(given,)) for given in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {tuple(tensor.data_ptr() for tensor in given) for given in sets}
    assert {machine.words(n) for n in range(len(machine.driver.launches))} == expected
    assert len(machine.driver.launches) == 800


def compared(machine: Machine, like: list[Any]) -> Callable[..., bool]:
    """`bound` for tensors like these."""
    run: Any = bound(machine)
    check = run.compare(torch.is_grad_enabled, tuple(like))
    if check is None:
        pytest.skip("this torch has no C interface to compare tensors")
    return check


DIFFERENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda tensor: tensor.view(torch.int32),
    "shape": lambda tensor: tensor[:32],
    "dimensions": lambda tensor: tensor.view(8, 8),
    "strides": lambda tensor: torch.zeros(128, dtype=tensor.dtype)[::2],
    "device": lambda tensor: tensor.to("meta"),
    "type": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "no tensor": lambda tensor: tensor.tolist(),
    "None": lambda tensor: None,
    "alignment": lambda tensor: torch.zeros(65, dtype=tensor.dtype)[1:],
}


@pytest.mark.parametrize("change", DIFFERENT)
@torch.no_grad()
def test_tensors_that_differ_are_not_launched(machine: Machine, change: str) -> None:
    """In dtype, shape, strides, device or type; None differs from a tensor."""
    like = tensors()
    check = compared(machine, like)
    assert check(*tensors()) is True
    for number in range(4):
        given = tensors()
        given[number] = DIFFERENT[change](given[number])
        assert check(*given) is False, number
    assert len(machine.driver.launches) == 1
    assert check(*like) is True


@torch.no_grad()
def test_values_that_are_not_compared(machine: Machine) -> None:
    """`...` takes any tensor, None only None; values behind those of the launches must stay where
    they are."""
    query, key, value, out, lse = tensors()
    lens, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    check = compared(machine, [query, key, value, ..., None, lens, table[:, :2]])
    wide = torch.zeros(4, 64, dtype=torch.float64)
    assert check(query, key, value, wide, None, lens, table[:, :2])
    query, key, value = tensors(3)
    assert check(query, key, value, out, None, lens, table[:, :2])
    assert machine.words(1) == (
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), 0,
    )  # fmt: skip
    for given in (
        (query, key, value, out, lse, lens, table[:, :2]),
        (query, key, value, out, None, lens.clone(), table[:, :2]),
        (query, key, value, out, None, lens, table[:, 2:]),
        (query, key, value, out, None, lens, table),
        (query, key, value, out, None, None, table[:, :2]),
        (query, key, value, [], None, lens, table[:, :2]),
    ):
        assert check(*given) is False
    with pytest.raises(TypeError, match="expected 7 tensors, got 5 values"):
        check(query, key, value, out, None)
    assert len(machine.driver.launches) == 2


def test_gradients_are_left_to_the_complete_check(machine: Machine) -> None:
    """Tensors are not asked whether they require a gradient: False while gradients are recorded."""
    given = tensors()
    check = compared(machine, given)
    with torch.enable_grad():
        assert check(*given) is False
    with torch.inference_mode():
        assert check(*given) is True


def test_types_without_the_interface_are_not_read(machine: Machine) -> None:
    """Without the C interface of torch, signatures are compared in Python."""
    native, run = driver.compile_native(), bound(machine)
    assert native.use_tensor_type(int) is False
    assert native.use_tensor_type(torch.Tensor) is hasattr(torch.Tensor, INTERFACE)
    with pytest.raises(TypeError):
        run.compare(torch.is_grad_enabled, tensors())  # a list
    if hasattr(torch.Tensor, INTERFACE):
        with pytest.raises(ValueError, match="4 values for 5 tensors"):
            run.compare(torch.is_grad_enabled, tuple(tensors(4)))
