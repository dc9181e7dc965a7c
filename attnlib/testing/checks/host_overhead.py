"""P1 to P3 (GPU): no compilation, synchronization or allocation after warm-up.

P1: random batches after `attnlib.warmup` do not call Triton's compiler. Backends that do not
    use Triton are reported as not run, because other compilers have no such hook.
P2: build, write and forward run under torch's sync debug mode "error".
P3: forward allocates nothing: the caller provides the output, and the backend declares its
    workspace.

Backends that do not declare a CUDA-graph level guarantee neither P2 nor P3; both are unsupported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.compilations import compiled_kernels
from attnlib.testing.outcome import NotRun, UnsupportedCase
from attnlib.testing.runner import attend, make_impl, run_case
from attnlib.workspace import BatchLimits

__all__ = ["CHECKS"]

_SWEEP = 60


def _random_case(target: BackendUnderTest, draw: random.Random) -> Case:
    block = target.base_case.block_size
    parts = [f"q1s{draw.randint(1, 40 * block)}" for _ in range(draw.randint(0, 12))]
    for _ in range(draw.randint(0, 4)):
        query = draw.randint(1, 12 * block)
        parts.append(f"q{query}s{query + draw.randint(0, 20 * block)}")
    return target.case(batch="_".join(parts) or "q1", seed=draw.randint(0, 10**6), poison="zero")


def _check_compiles(target: BackendUnderTest, case: Case) -> str:
    from attnlib.layer import Attention
    from attnlib.layer.warmup import warmup

    spec, block = case.spec, case.block_size
    limits = BatchLimits(max_num_reqs=16, max_num_tokens=12 + 48 * block, max_seq_len=40 * block)
    layer = Attention(spec, backend=target.backend, device=target.device)
    builder = target.backend.make_builder(spec, target.device, limits=limits)
    cache = PagedKVCache.allocate(spec, 64, target.device, spec.kv_cache_layout)
    warmup(layer, cache, limits, builder=builder)
    if "triton" not in sys.modules:
        raise NotRun("this backend does not use Triton; other compilers have no compile hook")
    draw = random.Random(target.seed)
    with compiled_kernels() as compiled:
        for _ in range(_SWEEP):
            step = _random_case(target, draw).materialize(target.device, kv_written=False)
            metadata = builder.build(0, step.common())
            layer.impl.write_kv(
                step.inputs.key, step.inputs.value, step.cache(), metadata.slot_mapping
            )
            attend(layer.impl, step, metadata)
    if compiled:
        return f"{len(compiled)} kernels were compiled after warm-up, the first: {compiled[0].name}"
    return ""


def _compiles(target: BackendUnderTest) -> Iterator[CheckCase]:
    case = target.case()
    yield CheckCase("random-batches", partial(_check_compiles, target, case), case)


def _check_syncs(target: BackendUnderTest, case: Case) -> str:
    run_case(target.backend, case, target.device)  # the first call may initialize state
    step = case.materialize(target.device, kv_written=False)
    builder = target.backend.make_builder(step.spec, target.device)
    impl, common, cache = make_impl(target.backend, step), step.common(), step.cache()
    lse = torch.empty(step.inputs.query.shape[:2], dtype=torch.float32, device=target.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metadata = builder.build(0, common)
        impl.write_kv(step.inputs.key, step.inputs.value, cache, metadata.slot_mapping)
        impl.forward(
            step.inputs.query, cache, metadata, step.inputs.out, lse if case.needs_lse else None
        )
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return f"build, write or forward synchronizes with the GPU: {error} | case: {case}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _check_allocations(target: BackendUnderTest, case: Case) -> str:
    if target.backend.capabilities.allocates_in_forward:
        raise UnsupportedCase(
            ["allocates_in_forward=True: the kernels allocate scratch memory in every call"]
        )
    step = case.materialize(target.device)
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    impl = make_impl(target.backend, step)
    attend(impl, step, metadata)  # the first call may initialize state
    lse = torch.empty(step.inputs.query.shape[:2], dtype=torch.float32, device=target.device)
    cache = step.cache()
    before = torch.cuda.memory_stats(target.device)["allocation.all.allocated"]
    impl.forward(
        step.inputs.query, cache, metadata, step.inputs.out, lse if case.needs_lse else None
    )
    allocated = torch.cuda.memory_stats(target.device)["allocation.all.allocated"] - before
    return (
        f"forward allocates {allocated} GPU tensors; declare them as workspace | case: {case}"
        if allocated
        else ""
    )


def _syncs(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "decode_long", "prefill", "mixed"):
        # Only backends with CUDA-graph support guarantee this.
        case = target.case(batch=batch, cudagraph="UNIFORM_SINGLE_TOKEN_DECODE")
        yield CheckCase(batch, partial(_check_syncs, target, case), case)


def _allocations(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "decode_long", "prefill", "mixed"):
        # Only backends with CUDA-graph support guarantee this.
        case = target.case(batch=batch, cudagraph="UNIFORM_SINGLE_TOKEN_DECODE")
        yield CheckCase(batch, partial(_check_allocations, target, case), case)


CHECKS = (
    Check("P1", "no compilation after warm-up", _compiles, needs_gpu=True),
    Check("P2", "no synchronization in build, write and forward", _syncs, needs_gpu=True),
    Check("P3", "no allocation in forward", _allocations, needs_gpu=True),
)
