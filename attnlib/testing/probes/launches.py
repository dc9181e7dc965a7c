"""P1-P3 (GPU): after warm-up there is no compile, no synchronisation and no allocation.

P1: random batches after `attnlib.warmup`; Triton's compile hook must stay silent. Backends that compile by other means are
reported as not run: nobody else offers a hook.
P2: build, write and forward under torch's sync debug mode "error".
P3: forward allocates nothing: the output is the caller's and the workspace was declared.
Backends that declare no CUDA-graph level have promised neither, and refuse both.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.outcome import NotRun, Refused
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import attend, make_impl, run_case
from attnlib.workspace import BatchLimits

__all__ = ["PROBES"]

_SWEEP = 60


def _random_case(subject: Subject, draw: random.Random) -> Case:
    block = subject.base.block_size
    parts = [f"q1s{draw.randint(1, 40 * block)}" for _ in range(draw.randint(0, 12))]
    for _ in range(draw.randint(0, 4)):
        query = draw.randint(1, 12 * block)
        parts.append(f"q{query}s{query + draw.randint(0, 20 * block)}")
    return subject.case(batch="_".join(parts) or "q1", seed=draw.randint(0, 10**6), poison="zero")


def _check_compiles(subject: Subject, case: Case) -> str:
    from attnlib.layer import Attention
    from attnlib.warmup import warmup

    spec, block = case.spec, case.block_size
    limits = BatchLimits(max_num_reqs=16, max_num_tokens=12 + 48 * block, max_seq_len=40 * block)
    layer = Attention(spec, backend=subject.backend, device=subject.device)
    builder = subject.backend.make_builder(spec, subject.device, limits=limits)
    cache = PagedKVCache.allocate(spec, 64, subject.device, case.layout)
    warmup(layer, cache, limits, builder=builder)
    triton = sys.modules.get("triton")
    if triton is None:
        raise NotRun("this backend does not use Triton, and no other compiler offers a hook")
    compiled: list[str] = []
    runtime, draw = triton.knobs.runtime, random.Random(subject.seed)
    previous = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(
        str(kwargs.get("repr", "a kernel"))
    )
    try:
        for _ in range(_SWEEP):
            step = _random_case(subject, draw).step(subject.device, written=False)
            metadata = builder.build(0, step.common())
            layer.impl.write_kv(
                step.inputs.key, step.inputs.value, step.cache(), metadata.slot_mapping
            )
            attend(layer.impl, step, metadata)
    finally:
        runtime.jit_post_compile_hook = previous
    if compiled:
        return (
            f"{len(compiled)} kernels were compiled after warm-up, the first: {compiled[0][:200]}"
        )
    return ""


def _compiles(subject: Subject) -> Iterator[Check]:
    case = subject.case()
    yield Check("random-batches", lambda: _check_compiles(subject, case), case)


def _check_syncs(subject: Subject, case: Case) -> str:
    run_case(subject.backend, case, subject.device)  # warm: first use may set things up
    step = case.step(subject.device, written=False)
    builder = subject.backend.make_builder(step.spec, subject.device)
    impl, common, cache = make_impl(subject.backend, step), step.common(), step.cache()
    lse = torch.empty(step.inputs.query.shape[:2], dtype=torch.float32, device=subject.device)
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
        return f"build, write or forward waits for the GPU: {error} | case: {case}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _check_allocations(subject: Subject, case: Case) -> str:
    if subject.backend.capabilities.allocates_in_forward:
        raise Refused(
            [
                "allocates_in_forward is declared: its kernels take scratch memory from torch's allocator at every call"
            ]
        )
    step = case.step(subject.device)
    metadata = subject.backend.make_builder(step.spec, subject.device).build(0, step.common())
    impl = make_impl(subject.backend, step)
    attend(impl, step, metadata)  # warm
    lse = torch.empty(step.inputs.query.shape[:2], dtype=torch.float32, device=subject.device)
    cache = step.cache()
    before = torch.cuda.memory_stats(subject.device)["allocation.all.allocated"]
    impl.forward(
        step.inputs.query, cache, metadata, step.inputs.out, lse if case.needs_lse else None
    )
    made = torch.cuda.memory_stats(subject.device)["allocation.all.allocated"] - before
    return (
        f"forward allocates {made} tensors on the GPU; the workspace is to be declared | case: {case}"
        if made
        else ""
    )


def _syncs(subject: Subject) -> Iterator[Check]:
    for batch in ("decode", "decode_long", "prefill", "mixed"):
        # Only who lets a graph capture it has promised to neither wait nor allocate.
        case = subject.case(batch=batch, cudagraph="UNIFORM_SINGLE_TOKEN_DECODE")
        yield Check(batch, lambda case=case: _check_syncs(subject, case), case)  # type: ignore[misc]


def _allocations(subject: Subject) -> Iterator[Check]:
    for batch in ("decode", "decode_long", "prefill", "mixed"):
        # Only who lets a graph capture it has promised to neither wait nor allocate.
        case = subject.case(batch=batch, cudagraph="UNIFORM_SINGLE_TOKEN_DECODE")
        yield Check(batch, lambda case=case: _check_allocations(subject, case), case)  # type: ignore[misc]


PROBES = (
    Probe("P1", "no compile after warm-up", _compiles, needs_gpu=True),
    Probe("P2", "no synchronisation in build, write and forward", _syncs, needs_gpu=True),
    Probe("P3", "no allocation in forward", _allocations, needs_gpu=True),
)
