"""Launches recorded instead of run: which compiled kernel each call takes, bound and by Triton's own choice.

Nothing is compiled: a stand-in takes the place of each compiled kernel and bears Triton's own key of it, so that two
launches can be compared by what Triton tells kernels apart by. It needs a process that does not interpret Triton;
`python -m tests.ops.triton.recorded_launches` runs every check in one and prints a JSON object, check -> "" or traceback.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnlib.ops.triton import (
    arguments,
    cache_write,
    device,
    launch,
    merge_states,
    paged_decode,
    paged_prefill,
    prefill,
    slots,
)
from attnlib.ops.triton.device import DeviceLimits
from attnlib.ops.triton.hopper import paged_decode as hopper_decode
from attnlib.ops.triton.hopper import paged_prefill as hopper_prefill

CHIP = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
MODULES = (arguments, cache_write, merge_states, paged_decode, prefill, slots, hopper_decode, hopper_prefill)

BOUND_KERNELS = {
    "_decode_kernel", "_combine_kernel", "_prefill_kernel", "_write_kv_kernel", "_merge_states_kernel", "_slot_mapping_kernel",
    "hopper_decode_kernel", "join_pieces",
}  # fmt: skip
MEMORIES = ("_launches", "_launches_by_splits")


class Record(NamedTuple):
    """One launch: the kernel by Triton's key, grid, stream, launch attributes, and the arguments with addresses for tensors."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    attributes: tuple[Any, ...]
    arguments: tuple[Any, ...]


RECORDS: list[Record] = []
BY_TRITON: list[str] = []
"""Kernels launched through `JITFunction.run`, in order."""


class CudaLauncher:
    """A stand-in for Triton's launcher object, with the interface that both ends of the supported range share."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = False

    def __init__(self, key: str, launch_pdl: bool) -> None:
        self.key, self.launch_pdl = key, launch_pdl

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *rest)

    def launch(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        """Takes what the C function of Triton 3.6 takes."""
        (cooperative, pdl, scratch, profile), (metadata, launch_metadata, enter, leave), values = rest[:4], rest[4:8], rest[8:]
        assert function == 7 and metadata == ("packed",) and scratch is profile is launch_metadata is None
        hooked = bool(getattr(enter, "calls", None) or getattr(leave, "calls", None))
        plain = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
        RECORDS.append(Record(self.key, (x, y, z), stream, (cooperative, pdl, hooked), plain))


class StandIn:
    """In the place of a compiled kernel."""

    def __init__(self, key: str, launch_pdl: bool) -> None:
        self.run = CudaLauncher(key, launch_pdl)
        self.function, self.packed_metadata = 7, ("packed",)
        self.metadata = SimpleNamespace(target=GPUTarget("cuda", 90, 32))

    def launch_metadata(self, grid: Any, stream: int, *args: Any) -> None:
        return None


class Driver:
    """One device whose current stream is `stream`."""

    def __init__(self) -> None:
        self.stream = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, index: int) -> int:
        assert index == -1
        return self.stream


DRIVER = Driver()


def install() -> None:
    """From now on nothing is compiled or launched in this process, only recorded."""
    assert not device.INTERPRETED
    triton.runtime.driver.set_active(DRIVER)
    own_run = JITFunction.run

    def stand_in(self: Any, key: str, signature: Any, index: int, constants: Any, options: Any, *rest: Any) -> StandIn:
        kernel = StandIn(f"{self.fn.__name__} {key}", options.launch_pdl)
        self.device_caches[index][0][key] = kernel
        return kernel

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        BY_TRITON.append(self.fn.__name__)
        return own_run(self, *args, **kwargs)

    JITFunction._do_compile = stand_in
    JITFunction.run = launch._JIT_RUN = counted_run
    for module in MODULES:
        if hasattr(module, "limits_of"):
            module.__dict__["limits_of"] = lambda tensor: CHIP


@contextmanager
def by_triton() -> Iterator[None]:
    """Within, nothing is launched bound and nothing is remembered of earlier calls."""
    own = launch._undisturbed
    memories = [(module, name, getattr(module, name)) for module in MODULES for name in MEMORIES if hasattr(module, name)]
    launch._undisturbed = lambda: False
    for module, name, _ in memories:
        setattr(module, name, launch.Remembered())
    try:
        yield
    finally:
        launch._undisturbed = own
        for module, name, memory in memories:
            setattr(module, name, memory)


def recorded(call: Callable[[], object]) -> tuple[list[Record], list[str]]:
    """The launches of a call, and which of them went through Triton."""
    del RECORDS[:], BY_TRITON[:]
    call()
    return list(RECORDS), list(BY_TRITON)


class Draw:
    """Choices that calls of one family mostly share: each is the family's, but for one in `1 / CHANGE`."""

    CHANGE = 0.04

    def __init__(self, family: int, member: int) -> None:
        self._family, self._own = random.Random(family), random.Random(f"{family} {member}")

    def choice(self, options: tuple[Any, ...]) -> Any:
        """One of `options`."""
        number = self._family.randrange(len(options))
        return options[self._own.randrange(len(options)) if self._own.random() < self.CHANGE else number]


def tensor(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that now and then starts off a 16-byte boundary or has room between its rows."""
    room = draw.choice((0, 0, 0, 8, 1)) if len(shape) > 1 else 0
    offset = draw.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 4))
    inner = 1
    for size in shape[1:]:
        inner *= size
    flat = torch.zeros(offset + shape[0] * (inner + room), dtype=dtype)
    strides = [inner + room]
    for size in shape[1:]:
        inner //= size
        strides.append(inner)
    return flat.as_strided(shape, strides, offset)


def ints(draw: Draw, *shape: int) -> torch.Tensor:
    """int32 metadata, now and then int64, at any address."""
    return tensor(draw, shape, draw.choice((torch.int32,) * 5 + (torch.int64,)))


def attention(draw: Draw, decode: bool) -> Callable[[], object]:
    """One random call of `paged_decode` or `paged_prefill`."""
    dtype = draw.choice((torch.bfloat16, torch.float16))
    cache_dtype = draw.choice((dtype, dtype, torch.float8_e4m3fn))
    heads, tokens, reqs = draw.choice((4, 8)), draw.choice((1, 2, 16, 17)), draw.choice((1, 2, 16))
    options = {
        "max_query_len": draw.choice((1, 4)) if decode else draw.choice((16, 100)),
        "max_seq_len": draw.choice((100, 1000, 4097)),
        "scale": draw.choice((0.1, 1.0)),
        "causal": draw.choice((True, True, False, torch.ones(reqs, dtype=torch.bool))),
        "window": draw.choice(((-1, -1), (1, -1), (16, 0))),
        "attention_chunk_size": draw.choice((0, 0, 16)),
        "logits_soft_cap": draw.choice((0.0, 0.0, 1.0)),
        "sinks": draw.choice((None, None, tensor(draw, (heads,), torch.float32))),
        "query_bias": draw.choice((None, None, None, tensor(draw, (tokens, 100), torch.float32))),
        "k_scale": draw.choice((1.0, 0.5, tensor(draw, (1,), torch.float32), tensor(draw, (2,), torch.float32))),
        "out": tensor(draw, (tokens, heads, 64), dtype),
        "lse": draw.choice((None, tensor(draw, (tokens, heads), torch.float32))),
    }
    if decode:
        options["num_splits"] = draw.choice((None, None, 1, 3))
    cache = [tensor(draw, (8, 16, 2, 64), cache_dtype) for _ in range(2)]
    batch = (tensor(draw, (tokens, heads, 64), dtype), *cache, ints(draw, reqs, 8), ints(draw, reqs + 1), ints(draw, reqs))
    if decode:
        # The workspace of both calls has to be the same for their records to be.
        options["workspace"] = tensor(draw, (1 << 20,), torch.float32)
        return lambda: paged_decode.paged_decode(*batch, **options)
    return lambda: paged_prefill.paged_prefill(*batch, **options)


def hopper(draw: Draw) -> Callable[[], object]:
    """One random call of `paged_decode` that the Gluon kernel of Hopper can serve."""
    heads, tokens, reqs = draw.choice((4, 8)), draw.choice((1, 16)), draw.choice((1, 16))
    query, out = (torch.zeros(tokens, heads + draw.choice((0, 8)), 64, dtype=torch.bfloat16)[:, :heads] for _ in range(2))
    key = torch.zeros(draw.choice((8, 9)), 16, 2 + draw.choice((0, 2)), 64, dtype=torch.bfloat16)[:, :, :2]
    batch = (query, key, key if draw.choice((True, False)) else torch.zeros_like(key), ints(draw, reqs, 8), ints(draw, reqs + 1), ints(draw, reqs))
    options = {
        "max_query_len": draw.choice((1, 4)),
        "max_seq_len": draw.choice((4097, 8000)),
        "scale": draw.choice((0.1, 1.0)),
        "window": draw.choice(((-1, -1), (1, -1), (16, 0))),
        "attention_chunk_size": draw.choice((0, 16)),
        "logits_soft_cap": draw.choice((0.0, 1.0)),
        "sinks": draw.choice((None, tensor(draw, (heads,), torch.float32))),
        "lse": draw.choice((None, tensor(draw, (tokens, heads), torch.float32))),
        "workspace": tensor(draw, (1 << 20,), torch.float32),
        "kernels": "hopper",
    }
    return lambda: paged_decode.paged_decode(*batch, out=out, **options)


def write(draw: Draw) -> Callable[[], object]:
    """One random call of `write_kv`."""
    tokens, heads, blocks, block_size = draw.choice((1, 16, 17)), draw.choice((1, 2)), draw.choice((1, 8)), draw.choice((1, 16))
    key, value = (tensor(draw, (17, heads, 64), torch.bfloat16) for _ in range(2))
    cache = [tensor(draw, (blocks, block_size, heads, 64), torch.bfloat16) for _ in range(2)]
    slot_mapping = tensor(draw, (tokens,), torch.int64)
    scales = {"k_scale": draw.choice((1, 1.0, 2.0, tensor(draw, (1,), torch.float32))), "v_scale": draw.choice((1.0, 16))}
    return lambda: cache_write.write_kv(key, value, cache[0], cache[1], slot_mapping, **scales)


def merge(draw: Draw) -> Callable[[], object]:
    """One random call of `merge_states`."""
    tokens, heads = draw.choice((1, 16)), draw.choice((1, 4))
    a, b, out = (tensor(draw, (tokens, heads, 64), draw.choice((torch.bfloat16, torch.float32))) for _ in range(3))
    lses = [tensor(draw, (tokens, heads), torch.float32) for _ in range(3)]
    last = draw.choice((lses[2], None))
    return lambda: merge_states.merge_states(a, lses[0], b, lses[1], out, last)


def slot_mapping(draw: Draw) -> Callable[[], object]:
    """One random call of `compute_slot_mapping`."""
    reqs, tokens = draw.choice((1, 16)), draw.choice((1, 16, 100))
    batch = (ints(draw, reqs + 1), ints(draw, reqs), ints(draw, reqs, draw.choice((1, 16))))
    out, block_size = tensor(draw, (tokens,), torch.int64), draw.choice((1, 16))
    return lambda: slots.compute_slot_mapping(*batch, block_size, tokens, out)


KINDS: dict[str, Callable[[Draw], Callable[[], object]]] = {
    "decode": lambda draw: attention(draw, True),
    "prefill": lambda draw: attention(draw, False),
    "hopper": hopper,
    "write": write,
    "merge": merge,
    "slots": slot_mapping,
}


def check_random_calls() -> None:
    """Every launch, bound or not, is the one that Triton would have made: same kernel, grid, stream and arguments."""
    by_kernel: dict[str, int] = {}
    for kind, make in KINDS.items():
        for seed in range(960):
            call = make(Draw(seed // 32, seed))  # families of calls that differ in a few things each
            DRIVER.stream = seed
            ours, through_triton = recorded(call)
            with by_triton():
                theirs, all_of_them = recorded(call)
            assert ours == theirs, f"{kind} {seed}: {ours} instead of {theirs}"
            assert len(all_of_them) == len(theirs) > 0
            for kernel in {record.kernel.split()[0] for record in ours} - set(through_triton):
                by_kernel[kernel] = by_kernel.get(kernel, 0) + 1
    print("bound launches:", by_kernel)
    assert set(by_kernel) >= BOUND_KERNELS and min(by_kernel.values()) >= 20


def decode_call(offset: int = 0) -> Callable[[], object]:
    """A plain decode with two launches; `offset` elements off the boundary."""
    query = torch.zeros(8 + 4 * 512, dtype=torch.bfloat16)[offset:][: 4 * 512].view(4, 8, 64)
    cache, out, workspace = torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16), torch.zeros_like(query), torch.zeros(1 << 16)
    table, starts, lens = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    return lambda: paged_decode.paged_decode(
        query, cache, cache, table, starts, lens, max_query_len=1, max_seq_len=128, scale=0.1, out=out, num_splits=3, workspace=workspace
    )


def check_second_call_is_bound() -> None:
    """The first call goes through Triton, the next does not; one off the boundary does."""
    call = decode_call()
    assert len(recorded(call)[1]) == 2
    assert len(recorded(call)[0]) == 2 and not recorded(call)[1]
    assert recorded(decode_call(1))[1] == ["_decode_kernel"]
    assert not recorded(call)[1]


def check_hooks_and_switches_are_honoured() -> None:
    """Whatever Triton would do beside the launch is done: hooks, debugging, instrumentation, a replaced launcher."""
    call, runtime = decode_call(), triton.knobs.runtime
    recorded(call)
    assert not recorded(call)[1]

    def nothing(*args: Any) -> None:
        return None

    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.calls.append(nothing)
        try:
            records, through_triton = recorded(call)
            assert len(through_triton) == 2 and all(record.attributes[2] for record in records)
        finally:
            chain.calls.remove(nothing)
        assert not recorded(call)[1]
    for holder, name, value in (
        (runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "consan"),
        (launch, "_JIT_RUN", None),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        try:
            assert len(recorded(call)[1]) == 2, name
        finally:
            setattr(holder, name, before)
        assert not recorded(call)[1]
    seen: list[Any] = []
    paged_decode._decode_kernel.pre_run_hooks.append(lambda *args, **kwargs: seen.append(args))
    try:
        assert recorded(call)[1] == ["_decode_kernel"] and len(seen) == 1
    finally:
        paged_decode._decode_kernel.pre_run_hooks.clear()


def check_unknown_tritons_are_left_alone() -> None:
    """Another version, another launcher, a kernel that needs scratch memory of an unknown kind: Triton launches."""
    for holder, name, value in ((launch, "_KNOWN", False), (launch, "_direct_call", lambda compiled: None)):
        before = getattr(holder, name)
        setattr(holder, name, value)
        paged_decode._launches.clear()
        paged_decode._launches_by_splits.clear()
        try:
            call = decode_call()
            for _ in range(3):
                assert len(recorded(call)[1]) == 2, name
        finally:
            setattr(holder, name, before)
    foreign = StandIn("foreign", False)
    foreign.metadata = SimpleNamespace(target=GPUTarget("hip", "gfx942", 64))
    assert launch._direct_call(foreign) is None
    assert launch._direct_call(object()) is None


def check_memory_is_bounded() -> None:
    """Launches by the thousand do not pile up."""
    kept: launch.Remembered[int] = launch.Remembered()
    for number in range(10000):
        assert kept.keep(number, number) == number
        assert len(kept) <= 4096
    assert kept.get(9999) == 9999


CHECKS: tuple[Callable[[], None], ...] = (
    check_random_calls,
    check_second_call_is_bound,
    check_hooks_and_switches_are_honoured,
    check_unknown_tritons_are_left_alone,
    check_memory_is_bounded,
)


def main() -> None:
    """Run all checks; the last line is the result."""
    install()
    results = {}
    for check in CHECKS:
        try:
            check()
            results[check.__name__] = ""
        except Exception:
            results[check.__name__] = traceback.format_exc()[-4000:]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
