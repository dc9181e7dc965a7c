"""Record launches instead of running them: the kernel of each call, bound and as Triton selects it.

Nothing is compiled. A stub replaces each compiled kernel and holds Triton's own cache key, so that
two launches can be compared by kernel. This needs a process that does not interpret Triton:
`python -m tests.ops.triton.recorded_launches` runs every check and prints a JSON object that maps
checks to "" or a traceback.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.backends.triton import impl as triton_impl
from attnlib.backends.triton import scheduler as triton_scheduler
from attnlib.errors import ContractError
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.layer import plans as layer_plans
from attnlib.layer import state_checks
from attnlib.layer.call import LayerCall
from attnlib.layer.plans import find_plan, run_plan
from attnlib.layer.warmup import warmup
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.dispatch import cpu_as_gpu
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import (
    append_kv,
    cache_write,
    merge_states,
    paged_decode,
    paged_prefill,
    slots,
    varlen_prefill,
)
from attnlib.ops.triton.append_rows import RowAppend
from attnlib.ops.triton.heuristics import device
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper import decode_plan, dispatch, prefill_plan, select_decodes, sizes
from attnlib.ops.triton.kernels.decode import decode_kernel
from attnlib.ops.triton.launch import bound as launch
from attnlib.ops.triton.launch import run
from attnlib.ops.triton.launch.cache import LAUNCHES, LaunchCache
from attnlib.score_functions.builtin import alibi_sqrt
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits
from tests.ops.calls import call_operation
from tests.ops.triton import recorded_states
from tests.ops.triton.stub_driver import (
    BY_TRITON,
    DRIVER,
    ENCODED,
    RECORDS,
    Record,
    StandIn,
    replace_launcher,
)

ROOT = Path(__file__).parents[3]
KERNELS = ("auto", "portable")
CAN_COMPARE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
WORKSPACE = torch.zeros(1 << 20)
CHIP = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
MODULES = (
    device,
    triton_impl,
    triton_scheduler,
    cache_write,
    decode_plan,
    merge_states,
    paged_decode,
    paged_prefill,
    prefill_plan,
    slots,
    varlen_prefill,
)

BOUND_KERNELS = {
    "decode_kernel", "combine_kernel", "prefill_kernel", "write_kv_kernel", "merge_states_kernel",
    "append_kv_kernel", "slot_mapping_kernel", "hopper_decode_kernel", "hopper_combine_kernel",
    "hopper_prefill_kernel",
}  # fmt: skip


def install() -> None:
    """From now on nothing is compiled or launched in this process, only recorded."""
    assert not device.INTERPRETED
    device.current_device = DRIVER.get_current_device  # -1: where tensors of the CPU are
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
    for module in (*MODULES, device):
        for name in ("limits_of", "device_limits"):
            if hasattr(module, name):
                module.__dict__[name] = lambda tensor: CHIP


@contextmanager
def by_triton() -> Iterator[None]:
    """Inside, every kernel is launched by Triton, and no launch is cached from earlier calls."""
    own, cached = launch._JIT_RUN, dict(LAUNCHES)
    LAUNCHES.clear()
    launch._JIT_RUN = None  # as if somebody had replaced the launcher
    try:
        yield
    finally:
        launch._JIT_RUN = own
        LAUNCHES.clear()
        LAUNCHES.update(cached)


def recorded(call: Callable[[], object]) -> tuple[list[Record], list[str]]:
    """The launches of a call, and which of them went through Triton."""
    del RECORDS[:], BY_TRITON[:], ENCODED[:]
    call()
    return list(RECORDS), list(BY_TRITON)


class Draw:
    """Choices of a family of calls: a call has the family's, except one in `1 / CHANGE`."""

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
    """Return a random `paged_decode` or `paged_prefill` call that mostly suits a Hopper kernel."""
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


def append(draw: Draw) -> Callable[[], object]:
    """One random call of `append_kv`."""
    reqs, tokens, heads, block_size = (
        draw.choice((1, 16)),
        draw.choice((1, 3)),
        draw.choice((1, 2)),
        draw.choice((1, 16)),
    )
    key, value = (tensor(draw, (reqs, tokens, heads, 64), torch.bfloat16) for _ in range(2))
    cache = [tensor(draw, (8, block_size, heads, 64), torch.bfloat16) for _ in range(2)]
    batch = (ints(draw, reqs, draw.choice((1, 16))), ints(draw, reqs), ints(draw, reqs))
    return lambda: append_kv.append_kv(key, value, cache[0], cache[1], *batch)


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
    "append": append,
    "merge": merge,
    "slots": slot_mapping,
}


def with_one_workspace(prepared: Any, batch: Any, device: Any) -> Any:
    """`run.with_workspace` of equal addresses, where a call gives no workspace."""
    if batch.workspace is None and prepared.workspace_bytes:
        return batch._replace(workspace=WORKSPACE[: prepared.workspace_bytes // 4])
    return batch


def check_random_calls() -> None:
    """Every launch has the kernel, grid, stream and arguments that Triton would have used."""
    by_kernel: dict[str, int] = {}
    own, run.with_workspace = run.with_workspace, with_one_workspace
    for kind, make in KINDS.items():
        for seed in range(480):
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
    run.with_workspace = own
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
    assert recorded(decode_call(1))[1] == ["decode_kernel", "combine_kernel"]
    assert not recorded(call)[1]


def check_hooks_and_knobs_take_effect() -> None:
    """Hooks, debugging, instrumentation and a replaced launcher take effect."""
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
    decode_kernel.pre_run_hooks.append(lambda *args, **kwargs: seen.append(args))
    try:
        assert recorded(call)[1] == ["decode_kernel", "combine_kernel"] and len(seen) == 1
    finally:
        decode_kernel.pre_run_hooks.clear()


def check_unknown_versions_use_triton() -> None:
    """Triton launches with unknown versions, unknown launchers and unknown scratch memory."""
    for holder, name, value in (
        (launch, "_KNOWN", False),
        (launch, "direct_launch", lambda compiled, num_arguments: None),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        LAUNCHES.clear()
        try:
            call = decode_call()
            for _ in range(3):
                assert len(recorded(call)[1]) == 2, name
        finally:
            setattr(holder, name, before)
    foreign = StandIn("foreign", {}, False)
    foreign.metadata = SimpleNamespace(target=GPUTarget("hip", "gfx942", 64))
    assert launch.direct_launch(foreign, 0) is None
    assert launch.direct_launch(object(), 0) is None


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
    # The values are one block behind the keys: equal addresses would be a latent cache.
    batch = (query, cache[:-1], cache[1:], table, starts, lens)
    options: dict[str, Any] = {"max_seq_len": 600, "scale": 0.1, "out": out}
    if decode:
        options |= {"max_query_len": 1, "workspace": workspace, **others}
        return lambda: call_operation(paged_decode.paged_decode, *batch, **options)
    options |= {"max_query_len": 64, "counters": counters, **others}
    return lambda: call_operation(paged_prefill.paged_prefill, *batch, **options)


def check_descriptors_are_encoded_once() -> None:
    """Each address is encoded once, with the result of Triton's encoder."""
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


def check_warmups_encode_all_caches() -> None:
    """The first batches over caches that a warm-up was given encode nothing but queries."""
    spec = AttentionSpec(
        num_heads=16, num_kv_heads=4, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=512, max_seq_len=4096)
    layer = attnlib.Attention(spec, backend=Anywhere, device="cpu")
    first, *others = (attnlib.PagedKVCache.allocate(spec, 4, "cpu") for _ in range(3))
    builder = layer.backend.make_builder(spec, torch.device("cpu"), limits=limits)

    def encoded(cache: Any) -> set[int]:
        table = torch.zeros(2, 256, dtype=torch.int32)
        found = set()
        for queries in ([1, 300], [200, 100]):
            lengths = [query + 3000 for query in queries]
            common = CommonAttentionMetadata.from_lengths(queries, lengths, table, 16, "cpu")
            common.slot_mapping = None
            query = torch.zeros(sum(queries), 16, 128, dtype=torch.bfloat16)
            for _ in range(2):  # launches by Triton encode in every call
                recorded(lambda c=common, q=query: layer(q, None, None, cache, builder.build(0, c)))
                found |= set() if BY_TRITON else set(ENCODED)
        return found & {cache.key_cache.data_ptr(), cache.value_cache.data_ptr()}

    with cpu_as_gpu():
        warmup(layer, first, limits, builder=builder, more_caches=others[:1])
    assert not encoded(first) and not encoded(others[0])
    assert encoded(others[1])


def check_every_call_is_checked() -> None:
    """Every call checks what is not in its launch key: addresses, scales and the workspace."""
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


def check_which_kernel_combines() -> None:
    """The decode kernel combines the splits of large batches if it has a counter for each CTA."""
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
        torch.zeros(dispatch.num_counters(CHIP), dtype=torch.int32),
    )
    for _ in range(2):
        assert kernels(128, enough) == kernels(64, enough) == both[:1]
        for tokens, counters in ((64, None), (64, enough[:2]), (63, enough), (5, enough)):
            assert kernels(tokens, counters) == both, tokens


class Anywhere(TritonBackend):
    """The triton backend, on the CPU without the interpreter: nothing is run."""

    @classmethod
    def unavailable(cls, device: Any) -> list[str]:
        return []

    @classmethod
    def supports_combination(cls, spec: Any, device: Any) -> list[str]:
        return []


class Step:
    """One layer of 8 heads over 2 KV heads, its cache and a batch.

    Args:
        query_lens, seq_lens: of the batch.
        size: head size.
        kernels: "auto", "hopper" or "portable".
        stored: dtype of the cache.
        lse: whether calls return the LSE.
        writes: whether calls pass new keys and values.
        changes: fields of the spec.
    """

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        size: int = 64,
        kernels: str = "auto",
        stored: str = "auto",
        lse: bool = False,
        writes: bool = True,
        **changes: Any,
    ) -> None:
        self.spec = attnlib.AttentionSpec(
            num_heads=8,
            num_kv_heads=2,
            head_size=size,
            dtype=torch.bfloat16,
            block_size=16,
            kv_cache_dtype=stored,
            **changes,
        )
        backend = type("Configured", (Anywhere,), {"config": {"kernels": kernels}})
        sinks = torch.zeros(8) if self.spec.has_sink else None
        slopes = torch.zeros(8) if self.spec.has_alibi else None
        function = self.spec.score_function
        score = None if function is None else function.examples(8, seq_lens)
        self.layer = attnlib.Attention(
            self.spec, backend=backend, device="cpu", sinks=sinks, alibi_slopes=slopes,
            **({} if score is None else {"score_tensors": score}),
        )  # fmt: skip
        self.cache = attnlib.PagedKVCache.allocate(self.spec, 64 * len(query_lens), "cpu")
        reqs, tokens = len(query_lens), sum(query_lens)
        blocks = torch.arange(reqs * 64, dtype=torch.int32).view(reqs, 64)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, blocks, 16, "cpu"
        )
        self.batch = self.layer.backend.make_builder(self.spec, "cpu").build(0, common)
        self.query, self.key, self.value, self.out = (
            torch.zeros(tokens, heads, size, dtype=torch.bfloat16) for heads in (8, 2, 2, 8)
        )
        self.lse, self.writes = lse, writes

    def __call__(self, flat: bool = False) -> list[Record]:
        """The launches of a call; LSEs are written to one place, for records to be comparable."""
        return self.record(flat)[0]

    def record(self, flat: bool = False) -> tuple[list[Record], list[str]]:
        """The launches of a call, and which of them went through Triton."""
        q, k, v, out = (
            tensor.flatten(1) if flat else tensor
            for tensor in (self.query, self.key, self.value, self.out)
        )
        new = (k, v) if self.writes else (None, None)
        if not self.lse:
            return recorded(lambda: self.layer(q, *new, self.cache, self.batch, output=out))
        lse = self.__dict__.setdefault("_lse", torch.zeros(q.shape[0], 8))
        call = LayerCall(q, *new, self.cache, self.batch, out, lse is not None)
        layer = self.layer
        return recorded(lambda: run_plan(layer, find_plan(layer, call)[0], call, out, lse))

    def without_plans(self) -> list[Record]:
        """The launches that Triton makes for the call, with nothing kept of earlier calls."""
        kept = dict(self.batch.plans)
        self.batch.plans.clear()
        try:
            with by_triton():
                return self()
        finally:
            self.batch.plans.clear()
            self.batch.plans.update(kept)


STEPS: dict[str, Callable[[], Step]] = {
    "hopper decode": lambda: Step([1] * 4, [1000, 20, 3, 7]),
    "plain decode": lambda: Step([1] * 4, [64, 20, 3, 7]),
    "split plain decode": lambda: Step([1] * 2, [1000, 20], kernels="portable"),
    "hopper decode with sinks": lambda: Step([1] * 2, [600, 20], kernels="hopper", has_sink=True),
    "many hopper decodes": lambda: Step([1] * 128, [600] * 128, kernels="hopper"),
    "decode with slopes": lambda: Step([1] * 2, [1000, 20], has_alibi=True),
    "decode with a score function": lambda: Step([1] * 2, [900, 9], score_function=alibi_sqrt()),
    "fp8 decode": lambda: Step([1] * 2, [1000, 20], stored="fp8_e4m3"),
    "decode, head size 8": lambda: Step([1] * 2, [20, 9], size=8),
    "verification": lambda: Step([4, 2, 3], [900, 12, 77]),
    "decode with LSE": lambda: Step([1] * 4, [1000, 20, 3, 7], lse=True, needs_lse=True),
    "decode without a write": lambda: Step([1] * 4, [1000, 20, 3, 7], writes=False),
    "hopper prefill": lambda: Step([64, 100], [64, 900]),
    "plain prefill": lambda: Step([64, 100], [64, 900], kernels="portable"),
    "fp8 prefill": lambda: Step([64, 100], [64, 900], stored="fp8_e5m2"),
    "prefill with LSE": lambda: Step([64, 100], [64, 900], lse=True, needs_lse=True),
    "concurrent mixed batch": lambda: Step([1, 1, 64], [900, 800, 900]),
    "sequential mixed batch": lambda: Step([1, 1, 64], [90, 80, 100]),
    "plain mixed batch": lambda: Step([1, 1, 64], [900, 800, 900], kernels="portable"),
    "mixed batch with LSE": lambda: Step([1, 1, 64], [900, 800, 900], lse=True, needs_lse=True),
}


def check_plans() -> None:
    """Decodes, prefills and mixed batches: the first call of a kind goes through Triton, later
    ones go directly, for another layer's tensors too, and both launch the same."""
    kernels: dict[str, set[str]] = {}
    for name, make in STEPS.items():
        step = make()
        expected = step.without_plans()
        first, through_triton = step.record()
        assert first == expected, f"{name}: {first} instead of {expected}"
        for _ in range(2):
            DRIVER.stream += 1
            again, through_triton = step.record()
            assert not through_triton, f"{name}: {through_triton}"
            assert {record.stream for record in again} == {DRIVER.stream}, name
        if not step.lse:  # `attend` has no recent call
            assert step.batch.recent_plan.call is not None or not CAN_COMPARE, name
        other = make()
        step.cache, step.query, step.key, step.value, step.out = (
            other.cache, other.query, other.key, other.value, other.out,
        )  # fmt: skip
        moved, through_triton = step.record()
        assert not through_triton, f"{name}: {through_triton}"
        assert moved == step.without_plans(), name
        kernels[name] = {record.kernel.split()[0] for record in moved}
        assert len(step.batch.plans) == 1, name
    assert {"hopper_decode_kernel", "hopper_prefill_kernel"} <= kernels["concurrent mixed batch"]
    assert {"decode_kernel", "hopper_prefill_kernel"} <= kernels["sequential mixed batch"]
    assert {"decode_kernel", "prefill_kernel"} <= kernels["plain mixed batch"]
    assert "combine_kernel" in kernels["split plain decode"]


def check_rotated_calls() -> None:
    """Hopper decodes over pages of rotated heads, and prefills over copies of them, launch no
    rotation (P15); other calls do."""
    least, sizes.COPIED_TOKENS = sizes.COPIED_TOKENS, 64
    most, select_decodes._MOST_ROTATED_FEW = select_decodes._MOST_ROTATED_FEW, 1
    try:
        for lengths, size, rotations in (
            (([1] * 4, [1000, 20, 3, 7]), 128, 0),
            (([1, 1, 64], [900, 800, 900]), 128, 0),
            (([64], [900]), 128, 0),
            (([1] * 128, [600] * 128), 128, 2),  # more than one request for each worker
            (([9], [900]), 128, 2),  # too short for copies
            (([64], [900]), 96, 2),  # a rotation of blocks
        ):
            _check_rotations(lengths, size, rotations)
    finally:
        sizes.COPIED_TOKENS, select_decodes._MOST_ROTATED_FEW = least, most
        LAUNCHES.clear()


def _check_rotations(lengths: tuple[list[int], list[int]], size: int, rotations: int) -> None:
    """A call over rotated pages launches what one over plain pages does, and these rotations; with
    an unaligned query two, around portable kernels."""
    stored: dict[str, Any] = {"size": size, "stored": "int8_per_token_head"}
    step, plain = (Step(*lengths, **stored, kv_rotation=x) for x in ("hadamard", None))
    wanted = [record.kernel for record in step.without_plans()]
    step()
    launched, through_triton = step.record()
    assert [record.kernel for record in launched] == wanted, lengths
    names = [record.kernel.split()[0] for record in launched]
    assert not through_triton and len(launched) == len(plain()) + rotations, (lengths, names)
    assert names.count("rotate_heads_kernel") == rotations, (lengths, names)
    forward = step.layer.impl.forward
    launched, _ = recorded(lambda: forward(step.query, step.cache, step.batch, step.out))
    own = [record.kernel.split()[0] for record in launched]
    assert own.count("rotate_heads_kernel") == rotations and len(own) == len(names) - 1, own
    shape, numel = step.query.shape, step.query.numel()
    step.query = torch.zeros(numel + 1, dtype=torch.bfloat16)[1:].view(shape)
    names = [record.kernel.split()[0] for record in step()]
    assert names.count("rotate_heads_kernel") == 2, (lengths, names)
    assert rotations or not any("hopper" in name for name in names), (lengths, names)


def check_copied_prefills() -> None:
    """Prefills over copies of keys: the descriptors of a batch are those of its scratch memory."""
    least = sizes.COPIED_TOKENS
    sizes.COPIED_TOKENS = 1
    try:
        for lens, stored, changes, kernel in (
            ([64, 900], "fp8_e4m3", {}, "convert_cache_kernel"),
            ([9, 900, 900], "int8_per_token_head", {}, "convert_cache_kernel"),
            ([9, 64, 900], "fp8_e4m3", {"allow_fp8_queries": True}, "float8_copy_kernel"),
        ):
            query_lens = [1 if x == 9 else 64 for x in lens]
            step = Step(query_lens, lens, stored=stored, size=128, **changes)
            first, _ = step.record()
            assert kernel in {record.kernel.split()[0] for record in first}
            again, through_triton = step.record()
            assert not through_triton and again == first, stored
    finally:
        sizes.COPIED_TOKENS = least
        LAUNCHES.clear()


class _OneOutput:
    """torch, but outputs are one tensor, so that launches of several calls can be compared."""

    def __init__(self, output: torch.Tensor) -> None:
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, **options: Any) -> torch.Tensor:
        """The output, where it has this number of elements."""
        made = torch.empty(shape, **options)
        return self._output.view(shape) if made.numel() == self._output.numel() else made

    def empty_like(self, query: torch.Tensor) -> torch.Tensor:
        """The output."""
        return self._output.view_as(query)


def check_flash_attn_with_kvcache() -> None:
    """Repeated calls append and attend by direct launches, which equal those of Triton; hooks and
    unaligned keys are honored."""
    from attnlib.compat.flash_attn import kvcache_call, recent_call

    for kernels, length in (("auto", 900), ("portable", 900), ("portable", 20)):
        step = Step([1, 1, 1], [length] * 3, kernels=kernels)
        arguments: dict[str, Any] = {
            "q": step.query[:, None],
            "k_cache": step.cache.key_cache,
            "v_cache": step.cache.value_cache,
            "k": step.key[:, None],
            "v": step.value[:, None],
            "cache_seqlens": torch.full((3,), length - 1, dtype=torch.int32),
            "block_table": step.batch.block_table,
            "causal": True,
        }
        kvcache_call.torch = recent_call.torch = _OneOutput(step.out)
        try:
            with attnlib.use_backend(step.layer.backend), torch.no_grad():
                _check_repeated_appends(functools.partial(_recorded_function, arguments), arguments)
        finally:
            kvcache_call.torch = recent_call.torch = torch


def _check_repeated_appends(
    call: Callable[[], tuple[list[Record], list[str]]], arguments: dict[str, Any]
) -> None:
    from attnlib.compat.flash_attn.prepared import STATE

    STATE.calls.clear()
    STATE.recent = None
    call()
    for _ in range(3):
        DRIVER.stream += 1
        again, through_triton = call()
        assert STATE.recent is not None
    assert not through_triton, through_triton
    assert STATE.recent._bound is not None or not CAN_COMPARE
    assert again[0].kernel.split()[0] == "append_kv_kernel", again
    with by_triton():
        assert call()[0] == again
    arguments["k"] = torch.zeros(3, 1, 2, 65, dtype=torch.bfloat16)[..., 1:]
    call()
    unaligned, through_triton = call()
    assert "append_kv_kernel" in str(through_triton), through_triton
    assert len(unaligned) == len(again)


def _recorded_function(arguments: dict[str, Any]) -> tuple[list[Record], list[str]]:
    from attnlib.compat.flash_attn import flash_attn_with_kvcache

    return recorded(lambda: flash_attn_with_kvcache(**arguments))


@contextmanager
def _in_device_of_tensors() -> Iterator[None]:
    now, DRIVER.device = DRIVER.device, -1
    try:
        yield
    finally:
        DRIVER.device = now


def check_plans_step_aside() -> None:
    """Hooks, another current device and unaligned tensors are honored by a plan that exists."""
    for name in ("hopper decode", "hopper prefill", "concurrent mixed batch", "plain decode"):
        step = STEPS[name]()
        for _ in range(3):
            step()
        calls = triton.knobs.runtime.launch_enter_hook.calls
        calls.append(len)
        try:
            hooked, through_triton = step.record()
            assert through_triton and all(record.attributes[2] for record in hooked), name
        finally:
            calls.remove(len)
        hooks = cache_write.write_kv_kernel.pre_run_hooks
        hooks.append(lambda *args, **kwargs: None)
        step.batch.drop_plans()  # a kernel's own hooks are read when a plan is made
        try:
            assert step.record()[1], name
        finally:
            hooks.clear()
            step.batch.drop_plans()
        for _ in range(3):
            step()
        assert not step.record()[1], name
        DRIVER.device, guard = 3, device.device_guard
        device.device_guard = lambda tensor: _in_device_of_tensors()
        try:
            assert step.record()[1], "another device is current"
        finally:
            DRIVER.device, device.device_guard = -1, guard
        shape, numel = step.query.shape, step.query.numel()
        step.query = torch.zeros(numel + 1, dtype=torch.bfloat16)[1:].view(shape)
        unaligned = {record.kernel.split()[0] for record in step()}
        assert not any(kernel.startswith("hopper") for kernel in unaligned), unaligned
        assert step() == step.without_plans()


def _assign(name: str, value: Callable[[Step], Any]) -> Callable[[Step], None]:
    return lambda step: setattr(step.batch, name, value(step))


def _strided(*shape: int) -> torch.Tensor:
    """Zeros with a gap between rows of heads."""
    wide = torch.zeros(*shape[:-2], shape[-2] + 1, shape[-1], dtype=torch.bfloat16)
    return wide[..., : shape[-2], :]


CHANGES: dict[str, Callable[[Step], None]] = {
    **{
        f"another {name}": _assign(name, lambda step, name=name: getattr(step.batch, name).clone())
        for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")
    },
    "another workspace": _assign("workspace", lambda step: torch.zeros(1 << 20)),
    "fewer slots": _assign("slot_mapping", lambda step: step.batch.slot_mapping[:3]),
    "stride of the table": _assign(
        "block_table", lambda step: step.batch.block_table.as_strided((4, 64), (32, 1))
    ),
    "longest sequence": _assign("max_seq_len", lambda step: 200),
    "causal": _assign("causal", lambda step: False),
    "query_bias": _assign("query_bias", lambda step: torch.zeros(4, 1)),
    "another cache": lambda step: setattr(step.cache, "key_cache", step.cache.key_cache.clone()),
    "cache moved in place": lambda step: step.cache.key_cache.set_(step.cache.key_cache.clone()),
    "stride of the cache": lambda step: setattr(
        step.cache, "value_cache", _strided(256, 16, 2, 64)
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
    "scale of the impl": lambda step: setattr(step.layer.impl, "scale", 0.3),
}
"""Changes of a batch, a cache or a layer between two calls."""


def check_changes_between_calls() -> None:
    """After any change, a layer makes the same launches as without earlier calls."""
    for longest, (name, change) in itertools.product((1000, 64), CHANGES.items()):
        stored = "fp8" if "v_scale" in name or "k_scale" in name else "auto"
        step = Step([1] * 4, [longest, 20, 3, 7], stored=stored)
        for flat in (False, True):
            first = step(flat)
            assert step(flat) == step(flat) == first and len(first) >= 2
        assert len(step.batch.plans) == 2, "flat and per-head calls have a plan each"
        change(step)
        for _ in range(3):
            ours, theirs = step(), step.without_plans()
            assert ours == theirs and ours, f"{name}, {longest} keys: {ours} instead of {theirs}"


def check_scratch_off_the_boundary() -> None:
    """Decodes and prefills that divide keys are launched by Triton, as it does it, over a workspace
    that is not aligned."""
    for lengths, kernels in itertools.product((([1] * 2, [1000, 20]), ([64], [1000])), KERNELS):
        step = Step(*lengths, kernels=kernels)
        step.batch.max_seq_len = 5000  # a bound: nothing is read
        for _ in range(3):
            step()
        assert len(step()) == 3, "nothing is divided"
        for offset in (1, 0):
            step.batch.workspace = torch.zeros((1 << 20) + 1)[offset:]
            for _ in range(3):
                ours, theirs = step(), step.without_plans()
                assert ours == theirs, f"{lengths}, {kernels}: {ours} instead of {theirs}"
            assert len(step.record()[1]) == 3 * offset


def check_scales_in_pages() -> None:
    """Where scales and elements start decides which kernels read them, or whether any does."""
    formats = {"nvfp4": 8, "mxfp4": 4, "int4_per_group": 4, "int8_per_token_head": 1}
    for (name, count), decode in itertools.product(formats.items(), (True, False)):
        found = {}
        for first, start in ((0, 0), (1, 0), (count, 0), (0, 1), (0, 2), (0, 0)):
            call = _page_call(name, decode, first, start)
            found[first, start] = _kernels_or_error(call)
            assert found[first, start] == _kernels_or_error(call), (name, first, start)
            with by_triton():
                assert found[first, start] == _kernels_or_error(call), (name, first, start)
        plain, fast = "decode_kernel" if decode else "prefill_kernel", "hopper" if decode else ""
        assert found[0, 0][0].startswith(fast) and found[count, 0] == found[0, 0], (name, found)
        assert found[0, 2][0] == plain and "words of two bytes" in found[0, 1][0], (name, found)
        if name == "int4_per_group":
            assert "start at 2 modulo 8" in found[1, 0][0], found
        elif count > 1:
            assert found[1, 0][0] == plain, (name, found)


def _kernels_or_error(call: Callable[[], object]) -> list[str]:
    """The kernels of a call, or the message of its error."""
    try:
        return [record.kernel.split()[0] for record in recorded(call)[0]]
    except ContractError as error:
        return [str(error)]


def _page_call(name: str, decode: bool, first: int, start: int) -> Callable[[], object]:
    """A call over pages, whose scales start at the number `first` and its elements at the byte
    `start` of their memory."""
    stored, tokens = PAGE_FORMATS[name], 2 if decode else 64
    shape = (8, 16, 2, stored.stored_size(128))
    elements = torch.zeros(prod(shape) * stored.dtype.itemsize + start, dtype=torch.uint8)[start:]
    count = stored.num_scales(128)
    scales = torch.zeros(8 * 16 * 2 * count + first, dtype=stored.scale_dtype)[first:]
    query = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16)
    reqs = tokens if decode else 1
    ints = [torch.zeros(n, dtype=torch.int32) for n in ((reqs, 8), (reqs + 1,), (reqs,))]
    caches = [elements.view(stored.dtype).view(shape), elements.clone().view(stored.dtype)]
    options: dict[str, Any] = {
        "k_scale": scales.view(8, 16, 2, count),
        "v_scale": scales.view(8, 16, 2, count),
        "scale": 0.1,
        "max_query_len": 1 if decode else 64,
        "max_seq_len": 1000,
        "out": torch.zeros_like(query),
        "kernels": "hopper" if decode else "auto",
    }
    operation = paged_decode.paged_decode if decode else paged_prefill.paged_prefill
    batch = (query, caches[0], caches[1].view(shape), *ints)
    return lambda: call_operation(operation, *batch, **options)


def check_sinks_are_read_at_each_call() -> None:
    """Assigned sinks reach the next call, of another dtype too."""
    for name in ("hopper decode with sinks",):
        step = STEPS[name]()
        for _ in range(3):
            step()
        for sinks in (torch.ones(8), torch.ones(8, dtype=torch.bfloat16)):
            step.layer.sinks = sinks
            for _ in range(2):
                ours, theirs = step(), step.without_plans()
                assert ours == theirs
                assert any(sinks.data_ptr() in record.arguments for record in ours)


def check_replaced_methods() -> None:
    """A layer whose impl was given another `forward` calls it, although there is a plan."""
    step, seen = Step([1] * 4, [64, 20, 3, 7]), []
    for _ in range(3):
        step()
    step.layer.impl.forward = lambda *call: seen.append(call)
    assert [record.kernel.split()[0] for record in step()] == ["write_kv_kernel"] and len(seen) == 1
    del step.layer.impl.__dict__["forward"]
    step.layer.impl.prefix = ""  # any assignment renews the group
    assert len(step()) == 2 and len(seen) == 1


def check_files_of_layers() -> None:
    """A layer enters few files: a repeated one, and the first one of a step; so does a build.
    Without the checks of addresses, which batches on a GPU do not have."""
    sys.path.append(str(ROOT / "benchmarks"))
    from call_trace import TARGETS, traces

    with (
        patch.object(layer_plans, "check_addresses", lambda *call: None),
        patch.object(state_checks, "check_requests", lambda *call: None),
    ):
        found = traces("cpu", Anywhere)
    for name, target in TARGETS.items():
        files, calls = found[name]
        assert len(files) <= target, f"{name}: {sorted(files)}"
        most = 2 if name.startswith("repeated") else 23 if name.startswith("first") else 18
        most = 11 if "state" in name else most
        assert calls <= most, f"{name}: {calls} calls of Python functions"


def check_files_of_operations() -> None:
    """A repeated call without a layer finds its launches and launches them."""
    sys.path.append(str(ROOT / "benchmarks"))
    from call_trace import trace

    params, counters = AttentionParams(scale=0.1), torch.zeros(200, dtype=torch.int32)
    query, cache = torch.zeros(4, 8, 64).bfloat16(), torch.zeros(8, 16, 2, 64).bfloat16()
    ints = [torch.zeros(shape, dtype=torch.int32) for shape in ((4, 8), (5,), (4,))]

    def prefill() -> None:
        paged_prefill.paged_prefill(
            *(query, cache, cache, *ints, params),
            max_query_len=4,
            max_seq_len=128,
            out=torch.empty_like(query),
            counters=counters,
        )

    assert len(recorded(prefill)[0]) == len(recorded(prefill)[0]) == 1
    files, calls = trace(prefill)
    assert "ops/triton/launch/run.py" in files and len(files) <= 15, sorted(files)
    assert calls <= 45, calls


def check_bare_launches() -> None:
    """What `benchmarks/host_costs.py` compares layers with are the launches of the layer."""
    sys.path.append(str(ROOT / "benchmarks"))
    from layer_calls import BATCHES, LayerCall

    for name, lengths in BATCHES.items():
        call = LayerCall(*lengths, device="cpu", backend=Anywhere)
        for _ in range(3):
            theirs, through_triton = recorded(call)
        assert not through_triton and theirs, name
        assert recorded(call.bare_launches())[0] == theirs, name


def check_appended_rows() -> None:
    """The second token is launched directly, with its own position and buffers, as Triton would
    launch it."""
    new = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    buffers = [torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(4)]
    append = RowAppend(new, new, *buffers[:2])
    append.run(new, new, *buffers[:2], 7)
    for pair in (buffers[:2], buffers[2:]):
        direct, through_triton = recorded(lambda pair=pair: append.run(new, new, *pair, 8))
        assert not through_triton and direct[0].arguments[4] == 8
        assert direct[0].arguments[2:4] == tuple(buffer.data_ptr() for buffer in pair)
        with by_triton():
            assert recorded(lambda pair=pair: append.run(new, new, *pair, 8))[0] == direct
    for shape in ((2, 1, 4, 64), (2, 4, 128, 64)):
        size = prod(shape)
        unaligned = torch.zeros(size + 1, dtype=torch.bfloat16)[1:].view(shape)
        key, keys = (unaligned.transpose(1, 2), buffers[0]) if shape[1] == 1 else (new, unaligned)
        call = functools.partial(append.run, key, new, keys, buffers[1], 8)
        assert recorded(call)[1] == ["append_rows_kernel"]


def check_state_layers() -> None:
    """Repeated calls of a layer over states, and those over another batch and other slots, are
    direct launches that equal Triton's; inputs that are not aligned are left to Triton."""
    for work, count in recorded_states.KINDS:
        with recorded_states.scratch_is_kept():
            call = recorded_states.StateCall(Anywhere, work, count)
            first, through_triton = recorded(call)
            assert first and len(through_triton) == len(first), work
            for change in ("", "stream", "batch", "slots"):
                DRIVER.stream += change == "stream"
                if change == "batch":
                    call.batch = call.new_batch()
                if change == "slots":
                    call.cache = attnlib.StateCache.allocate(call.layer.spec, 2, device="cpu")
                direct, through_triton = recorded(call)
                assert not through_triton, f"{work}, {change}: {through_triton}"
                assert {record.stream for record in direct} == {DRIVER.stream}, work
                call.batch.plans.clear()
                with by_triton():
                    theirs, through_triton = recorded(call)
                assert direct == theirs, f"{work}, {change}: {direct} instead of {theirs}"
                assert len(through_triton) == len(theirs), f"{work}, {change}"
                call.batch.plans.clear()
            x = next(iter(call.tokens.rows.values()))
            assert x is not None
            shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
            call.tokens.rows[next(iter(call.tokens.rows))] = shifted
            launches, through_triton = recorded(call)
            # Long steps move such inputs.
            assert launches and bool(through_triton) == (work != "prefill"), work


def check_memory_is_bounded() -> None:
    """Thousands of launches do not accumulate."""
    kept = LaunchCache()
    for number in range(10000):
        assert kept.keep(number, number) == number
        assert len(kept) <= LaunchCache.LIMIT
    assert kept.get(9999) == 9999


CHECKS: tuple[Callable[[], None], ...] = (
    check_random_calls,
    check_second_call_is_bound,
    check_hooks_and_knobs_take_effect,
    check_unknown_versions_use_triton,
    check_descriptors_are_encoded_once,
    check_warmups_encode_all_caches,
    check_every_call_is_checked,
    check_plans,
    check_rotated_calls,
    check_copied_prefills,
    check_flash_attn_with_kvcache,
    check_plans_step_aside,
    check_changes_between_calls,
    check_scratch_off_the_boundary,
    check_scales_in_pages,
    check_sinks_are_read_at_each_call,
    check_which_kernel_combines,
    check_replaced_methods,
    check_files_of_layers,
    check_files_of_operations,
    check_bare_launches,
    check_appended_rows,
    check_state_layers,
    check_memory_is_bounded,
)


def main() -> None:
    """Run all checks; the last line is the result."""
    install()
    results = {}
    for check in CHECKS:
        try:
            with torch.no_grad():
                check()
            results[check.__name__] = ""
        except Exception:
            results[check.__name__] = traceback.format_exc()[-4000:]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
