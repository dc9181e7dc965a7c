"""G1, G3 and G4: metadata that is used after its batch.

G1: a step is captured at a padded size and replayed for smaller batches with other lengths, other
    blocks and poisoned padding. On a GPU the check uses a CUDA graph. On a CPU it calls forward
    again with the metadata of the capture, which detects builders that copy tensors instead of
    referring to them.
G3: tensors that a graph reads keep their addresses from one build to the next.
G4 (GPU): two steps are built and launched behind a long kernel, without synchronization.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.metadata.base import AttentionMetadata
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.captured_step import CapturedStep
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.latent import LATENT
from attnlib.testing.runner import AttentionOutput, attend, compare_with_oracle, make_impl

__all__ = ["CHECKS"]

_REQUESTS = 6


def _live_batches(block: int, query_len: int) -> tuple[str, ...]:
    q = query_len
    return (
        "_".join(f"q{q}s{s}" for s in (2 * block + 3, q, block, 5 * block, block + 1, 3 * block)),
        "_".join(f"q{q}s{s}" for s in (block + 2, 4 * block - 1)),
        f"q{q}s{5 * block + 1}",
        "_".join(f"q{q}s{s}" for s in (q, q, q, q + 1)),
        "2q0s0",
        "_".join(f"q{q}s{s}" for s in (3 * block, 2 * block, block, q)),
    )


def _check_replay(target: BackendUnderTest, case: Case, query_len: int) -> str:
    block = case.block_size
    lives = [
        case.replace(batch=batch, placement=placement, seed=case.seed + number, extra_columns=0)
        for number, (batch, placement) in enumerate(
            zip(
                _live_batches(block, query_len),
                ("shuffled", "reversed", "top", "contiguous", "shuffled", "interleaved"),
                strict=True,
            )
        )
    ]
    steps = [live.materialize(target.device, kv_written=False) for live in lives]
    captured = CapturedStep(
        target, case, query_len, max(step.inputs.placement.num_blocks for step in steps)
    )
    for number, (live, step) in enumerate(zip(lives, steps, strict=True)):
        captured.load(step, exact_bound=number % 2 == 1)
        captured.replay()
        rows = live.batch_spec.num_actual_tokens
        error = compare_with_oracle(live, AttentionOutput(captured.out[:rows], None), target.device)
        if error:
            return (
                f"replay {number} of a step captured for {_REQUESTS} requests of {query_len} "
                f"tokens: {error}"
            )
        if captured.out[rows:].any():
            return (
                f"replay {number}: padding rows {rows} and later must be exactly 0 (M6) "
                f"| case: {live}"
            )
    return ""


def _replays(target: BackendUnderTest) -> Iterator[CheckCase]:
    for level, query_lens in (
        ("UNIFORM_SINGLE_TOKEN_DECODE", (1,)),
        ("UNIFORM_BATCH", (1, 4)),
        ("ALWAYS", (1, 9)),
    ):
        for query_len in query_lens:
            case = target.case(cudagraph=level, needs_lse=False)
            yield CheckCase(
                f"{level.lower()}-q{query_len}",
                partial(_check_replay, target, case, query_len),
                case,
            )
    case = target.case(**LATENT, cudagraph="ALWAYS", needs_lse=False)
    yield CheckCase("always-q4-latent", partial(_check_replay, target, case, 4), case)


def _addresses(metadata: AttentionMetadata) -> dict[str, int]:
    return {
        name: value.data_ptr()
        for name, value in metadata.asdict_zerocopy().items()
        if isinstance(value, torch.Tensor) and not name.endswith("_cpu")
    }


def _check_addresses(target: BackendUnderTest, case: Case) -> str:
    steps = [
        case.replace(batch=batch, extra_columns=0).materialize(target.device, kv_written=False)
        for batch in _live_batches(case.block_size, 1)
    ]
    captured = CapturedStep(
        target, case, 1, max(step.inputs.placement.num_blocks for step in steps)
    )
    buffers = {
        name: tensor.data_ptr() for name, tensor in captured.state.get_graph_input_buffers().items()
    }
    at_capture = _addresses(captured.metadata)
    for step in steps:
        now = _addresses(captured.load(step))
        moved = [
            name for name, address in at_capture.items() if name in now and now[name] != address
        ]
        if moved:
            return (
                f"metadata tensors {', '.join(moved)} changed their address between builds; a "
                "graph reads the old address (G3)"
            )
        for name, tensor in captured.state.get_graph_input_buffers().items():
            if tensor.data_ptr() != buffers.get(name):
                return f"graph input buffer {name} changed its address between builds (G3)"
    return ""


def _lifetimes(target: BackendUnderTest) -> Iterator[CheckCase]:
    case = target.case(cudagraph="UNIFORM_SINGLE_TOKEN_DECODE", needs_lse=False)
    yield CheckCase("addresses", partial(_check_addresses, target, case), case)


def _check_race(target: BackendUnderTest, first: Case, second: Case) -> str:
    builder = target.backend.make_builder(first.spec, target.device)
    steps = [case.materialize(target.device) for case in (first, second)]
    impl = make_impl(target.backend, steps[0])
    commons = [step.common() for step in steps]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # 0.1 s of GPU time
    outputs = [
        attend(impl, step, builder.build(0, common))
        for step, common in zip(steps, commons, strict=True)
    ]
    torch.cuda.synchronize()
    errors = [
        compare_with_oracle(case, output, target.device)
        for case, output in zip((first, second), outputs, strict=True)
    ]
    return "; ".join(f"step {n} of two in flight: {text}" for n, text in enumerate(errors) if text)


def _race(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, batches in (
        ("decodes", ("decode", "decode_long")),
        ("mixed", ("mixed", "ragged")),
        ("long-then-short", ("decode_long", "q1s3")),
    ):
        first, second = (target.case(batch=batch) for batch in batches)
        yield CheckCase(name, partial(_check_race, target, first, second), first)


CHECKS = (
    Check("G1", "captured steps replay correctly for other batches", _replays),
    Check("G3", "tensors read by a graph keep their addresses", _lifetimes),
    Check("G4", "two steps in flight do not affect each other", _race, needs_gpu=True),
)
