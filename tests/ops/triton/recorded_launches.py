"""Launches recorded instead of run: which compiled kernel each call takes, bound and by Triton's own choice.

Nothing is compiled: a stand-in takes the place of each compiled kernel and bears Triton's own key of it, so that two
launches can be compared by what Triton tells kernels apart by. It needs a process that does not interpret Triton;
`python -m tests.ops.triton.recorded_launches` runs every check in one and prints a JSON object, check -> "" or traceback.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.backends.triton import metadata as triton_metadata
from attnlib.errors import ContractError
from attnlib.ops.triton import (
    arguments,
    cache_write,
    decode_step,
    device,
    launch,
    merge_states,
    paged_decode,
    paged_prefill,
    prefill,
    slots,
)
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper import dispatch as hopper_choice
from attnlib.ops.triton.hopper import paged_decode as hopper_decode
from attnlib.ops.triton.hopper import paged_prefill as hopper_prefill
from tests.ops.calls import call_operation
from tests.ops.triton.stub_driver import (
    BY_TRITON,
    DRIVER,
    ENCODED,
    REAL_LAUNCHER,
    RECORDS,
    Record,
    StandIn,
    replace_launcher,
)

CHIP = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
MODULES = (
    triton_metadata,
    arguments,
    cache_write,
    merge_states,
    paged_decode,
    prefill,
    slots,
    hopper_choice,
    hopper_decode,
    hopper_prefill,
)

BOUND_KERNELS = {
    "decode_kernel", "combine_kernel", "prefill_kernel", "write_kv_kernel", "merge_states_kernel", "slot_mapping_kernel",
    "hopper_decode_kernel", "hopper_combine_kernel", "hopper_prefill_kernel",
}  # fmt: skip
MEMORIES = ("_launches", "_launches_by_splits", "_decodes")


def install() -> None:
    """From now on nothing is compiled or launched in this process, only recorded."""
    assert not device.INTERPRETED
    device.current_device = lambda: -1  # where tensors of the CPU say that they are
    triton.runtime.driver.set_active(DRIVER)
    replace_launcher()
    own_run = JITFunction.run

    def stand_in(
        self: Any, key: str, signature: Any, index: int, constants: Any, options: Any, *rest: Any
    ) -> StandIn:
        kernel = StandIn(f"{self.fn.__name__} {key}", signature, options.launch_pdl)
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
    own = launch.undisturbed
    memories = [
        (module, name, getattr(module, name))
        for module in MODULES
        for name in MEMORIES
        if hasattr(module, name)
    ]
    launch.undisturbed = lambda: False
    for module, name, _ in memories:
        setattr(module, name, launch.Remembered())
    try:
        yield
    finally:
        launch.undisturbed = own
        for module, name, memory in memories:
            setattr(module, name, memory)


def recorded(call: Callable[[], object]) -> tuple[list[Record], list[str]]:
    """The launches of a call, and which of them went through Triton."""
    del RECORDS[:], BY_TRITON[:], ENCODED[:]
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
        return options[
            self._own.randrange(len(options)) if self._own.random() < self.CHANGE else number
        ]


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
        "k_scale": draw.choice(
            (1.0, 0.5, tensor(draw, (1,), torch.float32), tensor(draw, (2,), torch.float32))
        ),
        "out": tensor(draw, (tokens, heads, 64), dtype),
        "lse": draw.choice((None, tensor(draw, (tokens, heads), torch.float32))),
    }
    if decode:
        options["num_splits"] = draw.choice((None, None, 1, 3))
    cache = [tensor(draw, (8, 16, 2, 64), cache_dtype) for _ in range(2)]
    batch = (
        tensor(draw, (tokens, heads, 64), dtype),
        *cache,
        ints(draw, reqs, 8),
        ints(draw, reqs + 1),
        ints(draw, reqs),
    )
    if decode:
        # The workspace of both calls has to be the same for their records to be.
        options["workspace"] = tensor(draw, (1 << 20,), torch.float32)
        return lambda: call_operation(paged_decode.paged_decode, *batch, **options)
    options["counters"] = tensor(draw, (2,), torch.int32)
    return lambda: call_operation(paged_prefill.paged_prefill, *batch, **options)


def hopper(draw: Draw, decode: bool) -> Callable[[], object]:
    """One random call of `paged_decode` or `paged_prefill` that a Gluon kernel of Hopper can mostly serve."""
    heads, tokens, reqs = draw.choice((4, 8)), draw.choice((1, 16)), draw.choice((1, 16, 128))
    dtype = draw.choice((torch.bfloat16, torch.float16))
    offset = draw.choice((0, 0, 0, 0, 0, 0, 8, 1))
    room = draw.choice((0, 8))
    rows = tokens * (heads + room)
    query, out = (
        torch.zeros(offset + rows * 64, dtype=dtype)[offset:].view(tokens, heads + room, 64)[
            :, :heads
        ]
        for _ in range(2)
    )
    key = torch.zeros(
        draw.choice((8, 9)), draw.choice((16, 32)), 2 + draw.choice((0, 2)), 64, dtype=dtype
    )[:, :, :2]
    batch = (
        query,
        key,
        key if draw.choice((True, False)) else torch.zeros_like(key),
        ints(draw, reqs, 8),
        ints(draw, reqs + 1),
        ints(draw, reqs),
    )
    options = {
        "max_query_len": draw.choice((1, 4)) if decode else draw.choice((16, 100)),
        "max_seq_len": draw.choice((4097, 8000)),
        "scale": draw.choice((0.1, 1.0)),
        "window": draw.choice(((-1, -1), (1, -1), (16, 0))),
        "attention_chunk_size": draw.choice((0, 16)),
        "logits_soft_cap": draw.choice((0.0, 1.0)),
        "sinks": draw.choice((None, tensor(draw, (heads,), torch.float32))),
        "lse": draw.choice((None, tensor(draw, (tokens, heads), torch.float32))),
        "k_scale": draw.choice((1.0, 0.5)),
        "v_scale": draw.choice((1.0, 1.0, 0.5)),
        "kernels": "hopper" if decode else "auto",
    }
    # What a call would make for itself has to be the same for both calls, for their records to be.
    if decode:
        workspace = tensor(draw, (1 << 20,), torch.float32)
        options["workspace"] = draw.choice((workspace, workspace.view(torch.uint8)))
        options["counters"] = draw.choice(
            (None, tensor(draw, (2,), torch.int32), tensor(draw, (200,), torch.int32))
        )
        return lambda: call_operation(paged_decode.paged_decode, *batch, out=out, **options)
    options["counters"] = tensor(draw, (2,), torch.int32)
    return lambda: call_operation(paged_prefill.paged_prefill, *batch, out=out, **options)


def write(draw: Draw) -> Callable[[], object]:
    """One random call of `write_kv`."""
    tokens, heads, blocks, block_size = (
        draw.choice((1, 16, 17)),
        draw.choice((1, 2)),
        draw.choice((1, 8)),
        draw.choice((1, 16)),
    )
    key, value = (tensor(draw, (17, heads, 64), torch.bfloat16) for _ in range(2))
    cache = [tensor(draw, (blocks, block_size, heads, 64), torch.bfloat16) for _ in range(2)]
    slot_mapping = tensor(draw, (tokens,), torch.int64)
    scales = {
        "k_scale": draw.choice((1, 1.0, 2.0, tensor(draw, (1,), torch.float32))),
        "v_scale": draw.choice((1.0, 16)),
    }
    return lambda: cache_write.write_kv(key, value, cache[0], cache[1], slot_mapping, **scales)


def merge(draw: Draw) -> Callable[[], object]:
    """One random call of `merge_states`."""
    tokens, heads = draw.choice((1, 16)), draw.choice((1, 4))
    a, b, out = (
        tensor(draw, (tokens, heads, 64), draw.choice((torch.bfloat16, torch.float32)))
        for _ in range(3)
    )
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
    "hopper decode": lambda draw: hopper(draw, True),
    "hopper prefill": lambda draw: hopper(draw, False),
    "write": write,
    "merge": merge,
    "slots": slot_mapping,
}


def check_random_calls() -> None:
    """Every launch, bound or not, is the one that Triton would have made: same kernel, grid, stream and arguments."""
    by_kernel: dict[str, int] = {}
    for kind, make in KINDS.items():
        for seed in range(960):
            call = make(
                Draw(seed // 32, seed)
            )  # families of calls that differ in a few things each
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
    cache, out, workspace = (
        torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16),
        torch.zeros_like(query),
        torch.zeros(1 << 16),
    )
    table, starts, lens = (
        torch.zeros(4, 8, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
    )
    return lambda: call_operation(
        paged_decode.paged_decode,
        query,
        cache,
        cache,
        table,
        starts,
        lens,
        max_query_len=1,
        max_seq_len=128,
        scale=0.1,
        out=out,
        num_splits=3,
        workspace=workspace,
    )


def check_second_call_is_bound() -> None:
    """The first call goes through Triton, the next does not; one off the boundary does."""
    call = decode_call()
    assert len(recorded(call)[1]) == 2
    assert len(recorded(call)[0]) == 2 and not recorded(call)[1]
    assert recorded(decode_call(1))[1] == ["decode_kernel"]
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
    paged_decode.decode_kernel.pre_run_hooks.append(lambda *args, **kwargs: seen.append(args))
    try:
        assert recorded(call)[1] == ["decode_kernel"] and len(seen) == 1
    finally:
        paged_decode.decode_kernel.pre_run_hooks.clear()


def check_unknown_tritons_are_left_alone() -> None:
    """Another version, another launcher, a kernel that needs scratch memory of an unknown kind: Triton launches."""
    for holder, name, value in (
        (launch, "_KNOWN", False),
        (launch, "direct_call", lambda compiled: None),
    ):
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
    foreign = StandIn("foreign", {}, False)
    foreign.metadata = SimpleNamespace(target=GPUTarget("hip", "gfx942", 64))
    assert launch.direct_call(foreign) is None
    assert launch.direct_call(object()) is None


def hopper_call(
    decode: bool, query: torch.Tensor, cache: torch.Tensor, **others: Any
) -> Callable[[], object]:
    """A call that Hopper's own kernels serve, unless `others` says otherwise."""
    tokens, _, _ = query.shape
    out, workspace, counters = (
        torch.zeros_like(query),
        torch.zeros(1 << 20),
        torch.zeros(2, dtype=torch.int32),
    )
    table, starts, lens = (
        torch.zeros(shape, dtype=torch.int32) for shape in ((tokens, 8), (tokens + 1,), (tokens,))
    )
    batch = (query, cache, cache, table, starts, lens)
    options: dict[str, Any] = {"max_seq_len": 600, "scale": 0.1, "out": out}
    if decode:
        options |= {"max_query_len": 1, "workspace": workspace, **others}
        return lambda: call_operation(paged_decode.paged_decode, *batch, **options)
    options |= {"max_query_len": 64, "counters": counters, **others}
    return lambda: call_operation(paged_prefill.paged_prefill, *batch, **options)


def check_descriptors_are_encoded_once() -> None:
    """Addresses that were seen are not encoded again, a new one is, and what is kept is what Triton makes of it."""
    if not REAL_LAUNCHER:
        return  # bound there too, through the launcher object, which encodes at each call
    # Shapes that no other check has, so that nothing is kept of them.
    query, wide = (
        torch.zeros(5, 8, 64, dtype=torch.bfloat16),
        torch.zeros(11, 16, 4, 64, dtype=torch.bfloat16),
    )
    cache = wide[:, :, :2]
    moves = (
        (query.clone(), cache, False),
        (query, wide.clone()[:, :, :2], True),
        (query, cache[:10], True),
        (query, wide[:, :, ::2], True),
    )
    for decode, kernels in (
        (True, ["hopper_decode_kernel", "hopper_combine_kernel"]),
        (False, ["hopper_prefill_kernel"]),
    ):
        call = hopper_call(decode, query, cache)
        assert recorded(call)[1] == kernels
        assert not recorded(call)[1]  # bound; keeps what it encodes
        again, through_triton = recorded(call)
        assert not through_triton and not ENCODED
        with by_triton():
            assert recorded(call)[0] == again and len(ENCODED) == (2 if decode else 3)
        assert any(
            isinstance(value, tuple) and value[0] == "encoded" for value in again[0].arguments
        )
        for other, pool, other_pool in moves:
            fresh = 2 if other_pool else 0 if decode else 1
            moved = hopper_call(decode, other, pool)
            theirs, through_triton = recorded(moved)
            if through_triton:  # other shapes are bound anew
                theirs, through_triton = recorded(moved)
            assert not through_triton and len(ENCODED) == fresh, (decode, ENCODED)
            assert recorded(moved)[0] == theirs and not ENCODED
            with by_triton():
                assert recorded(moved)[0] == theirs


def check_each_call_is_looked_at() -> None:
    """What the key of a launch does not hold is looked at in every call: addresses, scales and the workspace."""
    query, cache = (
        torch.zeros(5, 8, 64, dtype=torch.bfloat16),
        torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16),
    )
    off = torch.zeros(5 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(5, 8, 64)

    def kernels(call: Callable[[], object]) -> list[str]:
        return [record.kernel.split()[0] for record in recorded(call)[0]]

    for decode, fast, plain in (
        (True, "hopper_decode_kernel", "decode_kernel"),
        (False, "hopper_prefill_kernel", "prefill_kernel"),
    ):
        strange: list[dict[str, Any]] = [{"v_scale": 0.5}, {"out": off}, {"kernels": "portable"}]
        if decode:
            strange.append({"workspace": torch.zeros(50_000)})
        for others in strange:
            for _ in range(2):
                assert kernels(hopper_call(decode, query, cache))[0] == fast
                assert kernels(hopper_call(decode, query, cache, **others))[0] == plain, others
        for counters in (
            None,
            torch.zeros(1, dtype=torch.int32),
        ):  # too few to be counted up: the call makes its own, or does without
            assert kernels(hopper_call(decode, query, cache, counters=counters))[0] == fast
        try:
            hopper_call(decode, query, cache, counters=torch.zeros(200))()
        except ContractError as error:
            assert "counters are torch.float32 and must be torch.int32 zeros" in str(error)
        else:
            raise AssertionError("counters of another kind were counted up")


def check_who_merges() -> None:
    """Many requests are merged by the decode itself, given counters for all of its programs; few, or without them, by a second kernel."""
    cache = torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16)

    def kernels(tokens: int, counters: torch.Tensor | None) -> list[str]:
        call = hopper_call(
            True,
            torch.zeros(tokens, 8, 64, dtype=torch.bfloat16),
            cache,
            counters=counters,
            kernels="hopper",
        )
        return [record.kernel.split()[0] for record in recorded(call)[0]]

    both, enough = (
        ["hopper_decode_kernel", "hopper_combine_kernel"],
        torch.zeros(hopper_choice.num_counters(CHIP), dtype=torch.int32),
    )
    for _ in range(2):
        assert kernels(128, enough) == both[:1]
        for tokens, counters in ((128, None), (128, enough[:2]), (127, enough), (5, enough)):
            assert kernels(tokens, counters) == both, tokens


class Tensors:
    """What one layer brings to a decode step of `tokens` tokens, `offset` elements off the boundary."""

    def __init__(
        self, size: int, offset: int = 0, stored: torch.dtype = torch.bfloat16, tokens: int = 5
    ) -> None:
        def rows(*shape: int) -> torch.Tensor:
            return torch.zeros(offset + torch.Size(shape).numel(), dtype=torch.bfloat16)[
                offset:
            ].view(shape)

        self.query, self.out, self.key, self.value = (
            rows(tokens, heads, size) for heads in (8, 8, 2, 2)
        )
        self.cache = rows(8, 16, 2, size).to(stored), rows(8, 16, 2, size).to(stored)
        self.sinks = torch.zeros(8)


def check_settled_steps() -> None:
    """A decode step served again makes the launches that the two operations make, for another layer's tensors too, or none at all."""
    _check_settled_step(64, 600, "hopper", True)
    _check_settled_step(128, 4000, "hopper", False)
    _check_settled_step(64, 700, "hopper", True, tokens=128)
    _check_settled_step(64, 100, "portable", True)
    _check_settled_step(64, 4000, "portable", False)
    _check_settled_step(8, 20, "auto", False)
    _check_settled_step(64, 4000, "auto", True, torch.float8_e4m3fn)


def _check_settled_step(
    size: int,
    longest: int,
    kernels: str,
    has_sink: bool,
    stored: torch.dtype = torch.bfloat16,
    tokens: int = 5,
) -> None:
    batch = decode_step.DecodeBatch(
        torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, 8, dtype=torch.int32), torch.zeros(tokens + 1, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32), 1, longest, torch.zeros(1 << 20), torch.zeros(hopper_choice.num_counters(CHIP), dtype=torch.int32),
    )  # fmt: skip

    def usual(own: Tensors) -> None:
        cache_write.write_kv(own.key, own.value, *own.cache, batch.slot_mapping)
        call_operation(
            paged_decode.paged_decode, own.query, *own.cache, batch.block_table, batch.query_start_loc, batch.seq_lens, max_query_len=1,
            max_seq_len=longest, scale=0.25, sinks=own.sinks if has_sink else None, out=own.out, workspace=batch.workspace,
            counters=batch.counters, kernels=kernels,
        )  # fmt: skip

    def settled(own: Tensors) -> decode_step.Repeat | None:
        options = arguments.Options(
            0.25,
            True,
            (-1, -1),
            0,
            0.0,
            None,
            own.sinks if has_sink else None,
            None,
            1.0,
            1.0,
            own.out,
            None,
        )
        return decode_step.settle(
            own.query, own.key, own.value, *own.cache, batch, options, kernels
        )

    def again(step: decode_step.Repeat, own: Tensors) -> bool:
        return step(
            own.query, own.key, own.value, *own.cache, own.sinks if has_sink else None, own.out
        )

    first, other, off = (Tensors(size, offset, stored, tokens) for offset in (0, 0, 1))
    assert settled(first) is None, "nothing has been served yet"
    for own in (first, other, first):
        usual(own)
    step = settled(first)
    assert step is not None
    for own in (first, other):
        DRIVER.stream += 1
        theirs, through_triton = recorded(lambda own=own: usual(own))
        assert not through_triton
        mine, through_triton = recorded(lambda own=own: again(step, own))
        assert mine == theirs and len(mine) >= 2 and not through_triton, (size, kernels)
        assert {record.stream for record in mine} == {DRIVER.stream}, (
            "the current stream of each call"
        )
    assert (
        again(step, first)
        and recorded(lambda: again(step, off)) == ([], [])
        and not again(step, off)
    )
    triton.knobs.runtime.launch_enter_hook.calls.append(len)
    try:
        assert recorded(lambda: again(step, first)) == ([], []) and not again(step, first), (
            "somebody listens to launches"
        )
    finally:
        triton.knobs.runtime.launch_enter_hook.calls.remove(len)
    cache_write.write_kv_kernel.pre_run_hooks.append(lambda *args, **kwargs: None)
    try:
        assert recorded(lambda: again(step, first)) == ([], []) and not again(step, first), (
            "somebody listens to a kernel"
        )
    finally:
        cache_write.write_kv_kernel.pre_run_hooks.clear()
    device_now, device.current_device = device.current_device, lambda: 3
    try:
        assert recorded(lambda: again(step, first)) == ([], []) and not again(step, first), (
            "another device is the current one"
        )
    finally:
        device.current_device = device_now
    if has_sink:
        sinks = first.sinks
        for strange in (torch.zeros(16)[::2], torch.zeros(8, dtype=torch.float64), None):
            first.sinks = strange
            assert recorded(lambda: again(step, first)) == ([], []) and not again(step, first), (
                "sinks of another kind"
            )
        first.sinks = sinks
    for moved in (
        batch.slot_mapping,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.workspace,
        batch.counters,
    ):
        _check_moved(moved, lambda: again(step, first))
    assert again(step, first)
    if kernels == "hopper":
        assert recorded(lambda: again(step, Tensors(size, tokens=tokens))) == ([], []), (
            "a cache whose descriptors nobody encoded yet"
        )
    small = dataclasses.replace(batch, workspace=torch.zeros(8))
    options = arguments.Options(
        0.25,
        True,
        (-1, -1),
        0,
        0.0,
        None,
        first.sinks if has_sink else None,
        None,
        1.0,
        1.0,
        first.out,
        None,
    )
    if longest == 4000:
        assert (
            decode_step.settle(
                first.query, first.key, first.value, *first.cache, small, options, kernels
            )
            is None
        )


def _check_moved(moved: torch.Tensor, call: Callable[[], bool]) -> None:
    """A tensor of the batch that lies elsewhere or in another way, though it is the same object: nothing is launched."""
    before = moved.data
    for other in (
        before.clone(),
        before[:1] if moved.dim() == 1 else before.as_strided(before.shape, (4, 1)),
    ):
        moved.set_(other)
        assert recorded(call) == ([], []) and not call(), other.shape
    moved.set_(before)


class Anywhere(TritonBackend):
    """The triton backend, on the CPU without the interpreter: nothing is run."""

    @classmethod
    def unavailable(cls, device: Any) -> list[str]:
        return []

    @classmethod
    def supports_combination(cls, spec: Any, device: Any) -> list[str]:
        return []


class Step:
    """One layer of 8 heads over 2, its cache and a decode batch of 4 requests of up to `longest` keys."""

    def __init__(self, longest: int) -> None:
        self.spec = attnlib.AttentionSpec(
            num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, block_size=16
        )
        self.layer = attnlib.Attention(self.spec, backend=Anywhere, device="cpu")
        self.cache = attnlib.PagedKVCache.allocate(self.spec, 300, "cpu")
        lengths = [longest, 20, 3, 7]
        blocks = torch.arange(4 * 64, dtype=torch.int32).view(4, 64)
        common = attnlib.CommonAttentionMetadata.from_lengths([1] * 4, lengths, blocks, 16, "cpu")
        self.batch = self.layer.backend.make_builder(self.spec, "cpu").build(0, common)
        self.query, self.key, self.value = (
            torch.zeros(4, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2)
        )
        self.out = torch.zeros_like(self.query)

    def __call__(self, flat: bool = False) -> list[Record]:
        """The launches of a call."""
        tensors = [
            tensor.flatten(1) if flat else tensor
            for tensor in (self.query, self.key, self.value, self.out)
        ]
        return recorded(
            lambda: self.layer(*tensors[:3], self.cache, self.batch, output=tensors[3])
        )[0]


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor lie where and as another does; it stays the same object."""
    tensor.set_(other)


def _strided(*shape: int) -> torch.Tensor:
    """Zeros with room between their rows of heads."""
    return torch.zeros(*shape[:-2], shape[-2] + 1, shape[-1], dtype=torch.bfloat16)[
        ..., : shape[-2], :
    ]


CHANGES: dict[str, Callable[[Step], None]] = {
    **{
        f"another {name}": lambda step, name=name: setattr(
            step.batch, name, getattr(step.batch, name).clone()
        )  # type: ignore[misc]
        for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")
    },
    **{
        f"{name} swapped": lambda step, name=name: _swap(
            getattr(step.batch, name), getattr(step.batch, name).clone()
        )  # type: ignore[misc]
        for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")
    },
    "another workspace": lambda step: setattr(step.batch, "workspace", torch.zeros(1 << 20)),
    "fewer slots": lambda step: _swap(step.batch.slot_mapping, step.batch.slot_mapping[:3]),
    "stride of the table": lambda step: _swap(
        step.batch.block_table, step.batch.block_table.as_strided((4, 64), (32, 1))
    ),
    "longest sequence": lambda step: setattr(step.batch, "max_seq_len", 200),
    "causal": lambda step: setattr(step.batch, "causal", False),
    "query_bias": lambda step: setattr(step.batch, "query_bias", torch.zeros(4, 1)),
    "cache swapped": lambda step: _swap(step.cache.key_cache, step.cache.key_cache.clone()),
    "stride of the cache": lambda step: setattr(
        step.cache, "value_cache", _strided(300, 16, 2, 64)
    ),
    "stride of the cache, in place": lambda step: _swap(
        step.cache.key_cache, _strided(300, 16, 2, 64)
    ),
    "stride of the query": lambda step: setattr(step, "query", _strided(4, 8, 64)),
    "stride of the keys": lambda step: setattr(step, "key", _strided(4, 2, 64)),
    "stride of the values": lambda step: setattr(step, "value", _strided(4, 2, 64)),
    "stride of the output": lambda step: setattr(step, "out", _strided(4, 8, 64)),
    "key off the boundary": lambda step: setattr(
        step, "key", torch.zeros(513, dtype=torch.bfloat16)[1:].view(4, 2, 64)
    ),
    "k_scale of the cache": lambda step: setattr(step.cache, "k_scale", 0.5),
    "v_scale of the layer": lambda step: setattr(step.layer, "v_scale", torch.ones(())),
}
"""What may become of a batch, a cache or a layer between two calls."""


def check_settled_layers() -> None:
    """Whatever changes between two calls, a layer makes the launches that it would have made without the first."""
    for longest, (name, change) in itertools.product((1000, 64), CHANGES.items()):
        step = Step(longest)
        for flat in (False, True):
            first = step(flat)
            assert step(flat) == step(flat) == first and len(first) >= 2
        assert len(step.batch.settled) == 2 and all(step.batch.settled.values()), (
            "flat and per head are settled"
        )
        DRIVER.stream += 1
        assert {record.stream for record in step()} == {DRIVER.stream}
        change(step)
        for _ in range(3):
            mine = step()
            with by_triton():
                theirs = step()
            assert mine == theirs and mine, f"{name}, {longest} keys: {mine} instead of {theirs}"


def check_impls_of_somebody_else() -> None:
    """A layer whose impl was given other methods is served by them, though calls like it are settled."""
    step, seen = Step(64), []
    for _ in range(3):
        step()
    assert all(step.batch.settled.values())
    step.layer.impl.forward = lambda *call: seen.append(call)
    assert [record.kernel.split()[0] for record in step()] == ["write_kv_kernel"] and len(seen) == 1
    del step.layer.impl.forward
    assert len(step()) == 2 and len(seen) == 1


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
    check_descriptors_are_encoded_once,
    check_each_call_is_looked_at,
    check_settled_steps,
    check_settled_layers,
    check_who_merges,
    check_impls_of_somebody_else,
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
