"""Divided layers on several GPUs, by memory, with NCCL and in CUDA graphs; run by
`test_attention_gpus.py`.

    torchrun --nproc-per-node 2 -m tests.parallel.gpu_ranks
    torchrun --nproc-per-node 4 -m tests.parallel.gpu_ranks --limit-seconds 560
    torchrun --nproc-per-node 2 -m tests.parallel.gpu_ranks --one-gpu [--only "by memory"]
    for i in 1 2 3; do torchrun --standalone ... --part $i/3 & done; wait

NCCL refuses two ranks on one GPU, and gloo has no all-to-all of CUDA tensors. With `--one-gpu` what
ranks send passes through the CPU, so that kernels and batches are tested, but not NCCL; "by memory"
each process maps the memory of the others, and a kernel that waits takes turns with that of the
other process. Without a GPU, that is a dry run of this file.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from attnlib import AttentionSpec, PagedKVCache
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.parallel import Interleaved, ParallelAttention, RankGroup, divided_batch
from tests.parallel import prefill_cases
from tests.parallel.cases import PROBLEMS
from tests.parallel.problem import STEPS, Problem, Run, error_of

TIMEOUT = timedelta(seconds=120)
"""Of an exchange, the first of which waits until the other ranks have compiled their kernels."""
LIMIT = 0.05
"""In bfloat16, of numbers of about 3: two roundings of results, and one of each part."""


def in_bfloat16(problem: Problem) -> Problem:
    """The same layer in the dtype and with head sizes of the GPU's kernels."""
    sizes = {"head_size": 64}
    if problem.spec.get("use_mla"):
        sizes = {"head_size": 576, "head_size_v": 512}
    return replace(problem, spec={**problem.spec, **sizes, "dtype": torch.bfloat16})


BOTH = ("grouped heads", "sinks", "latents", "fp8", "window", "sinks, soft cap, window")
"""Problems of both exchanges: by messages and by memory."""
REPLAYED = Problem({"has_sink": True})


def exchanged_by(method: str, problem: Problem) -> Problem:
    """With a method, unless the problem has one or is batch invariant."""
    given = {} if problem.spec.get("batch_invariant") else {"exchange": method}
    return replace(problem, options={**given, **problem.options})


def replay_error(problem: Problem, group: RankGroup, device: str) -> float:
    """A graph of a decode follows batches of the same sizes, with other tables."""
    run = Run(problem, group, device)
    for name in ("prefill", "mixed", "decode"):
        run.step(STEPS[name])
    first, second = ([end + n for _, end in STEPS["decode"]] for n in (1, 2))
    builder, ones, order = run.builders[1], [1] * 4, [2, 0, 3, 1]

    def batch(seq_lens: list[int]) -> object:
        return divided_batch(ones, seq_lens, run.tables[1], device)

    metadata = builder.build_for_cudagraph_capture(batch(first))
    query, key, value = run.tensors(4)
    inputs = [run.own(query), key.clone(), value.clone()]
    run.layer(*inputs, run.caches[1], metadata)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = run.layer(*inputs, run.caches[1], metadata, True)
    graph.replay()
    run.step(list(zip(ones, first, strict=True)))  # the reference writes its keys
    second = [second[request] for request in order]
    run.tables = [table[order] for table in run.tables]
    state = run.random.get_state()
    query, key, value = run.tensors(4)
    run.random.set_state(state)
    for tensor, given in zip(inputs, (run.own(query), key, value), strict=True):
        tensor.copy_(given)
    builder.build(batch(second))
    graph.replay()
    replayed = out.clone(), lse.clone()
    found = run.step(list(zip(ones, second, strict=True)))
    return error_of(*replayed, *found[2:])


def halves_error(problem: Problem, group: RankGroup, device: str) -> float:
    """Each half of the ranks shares keys of its own: two groups, with buffers of their own."""
    half = group.world_size // 2
    parts = [
        dist.new_group(list(range(first, first + half)), timeout=TIMEOUT) for first in (0, half)
    ]
    return decode_error(problem, RankGroup(parts[group.rank // half]), device)


def splits_error(problem: Problem, group: RankGroup, device: str) -> float:
    """Decodes of long requests, whose splits the exchange by memory combines, against messages;
    with a graph of them."""
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    lengths, division = [20_000, 7, 9_000], Interleaved(group.world_size)
    by_memory, by_messages = (
        ParallelAttention(spec, group, division, exchange=method, device=device)
        for method in ("peer_memory", "all_to_all")
    )
    torch.manual_seed(group.rank)
    columns = -(-division.bound(max(lengths)) // spec.block_size)
    cache = PagedKVCache.allocate(spec, len(lengths) * columns, device)
    for part in (cache.key_cache, cache.value_cache):
        part.normal_()
    table = torch.randperm(len(lengths) * columns, device=device).view(len(lengths), -1).int()
    common = divided_batch([1] * len(lengths), lengths, table, device)
    batch = by_memory.make_builder().build_for_cudagraph_capture(common, write=False)
    query = torch.randn(len(lengths), 8, 128, dtype=spec.dtype, device=device)
    wanted = by_messages(query, None, None, cache, batch, True)
    found = by_memory(query, None, None, cache, batch, True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = by_memory(query, None, None, cache, batch, True)
    graph.replay()
    return max(error_of(*each, *wanted) for each in (found, replayed))


class ThroughHost(RankGroup):
    """Ranks whose tensors are copied to the CPU and back for each exchange by messages."""

    buffers: PeerBuffers | None = None

    def peers(self, device: torch.device) -> PeerBuffers | list[str]:
        """Memory of the processes of one GPU, for which torch has no rendezvous."""
        if device.type != "cuda":
            return super().peers(device)
        if self.buffers is None:
            own = torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            handles: list[Any] = [None] * self.world_size
            dist.all_gather_object(handles, reduce_tensor(own))
            memory = [
                own if rank == self.rank else open_handle(*arguments)
                for rank, (open_handle, arguments) in enumerate(handles)
            ]
            self.buffers = PeerBuffers.of(memory, self.rank, limit=timedelta(seconds=60))
            torch.cuda.synchronize(device)
            dist.barrier()
        return self.buffers

    def check_device(self, device: torch.device) -> None:
        super().check_device(torch.device("cpu"))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_gather(tensor.cpu()).to(tensor.device)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        received = torch.empty_like(out, device="cpu")
        super().all_to_all(received, tensor.cpu())
        out.copy_(received)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().reduce_scatter(tensor.cpu()).to(tensor.device)

    def start_shift(
        self, out: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Any]:
        received = [torch.empty_like(each, device="cpu") for each in out]
        for request in super().start_shift(received, [each.cpu() for each in tensors]):
            request.wait()
        for each, found in zip(out, received, strict=True):
            each.copy_(found)
        return []


def problems(shared: bool) -> list[tuple[str, Any, Problem]]:
    """Names, functions and their arguments.

    Args:
        shared: all ranks have one GPU, or none.
    """
    found = [(name, decode_error, problem) for name, problem in PROBLEMS.items()]
    if shared and torch.cuda.is_available():
        named = [each for each in found if each[0] in BOTH]
        named.append(("replays", replay_error, REPLAYED))
        found += [(f"by memory: {x}", y, exchanged_by("peer_memory", last)) for x, y, last in named]
    if not shared:
        found.append(("replays", replay_error, REPLAYED))
        if dist.get_world_size() % 2 == 0:
            found.append(("halves of the ranks", halves_error, PROBLEMS["sinks"]))
        found.append(("splits", splits_error, Problem()))
        named = [each for each in found if each[0] in (*BOTH, "replays")]
        found = [(f"by memory: {x}", y, exchanged_by("peer_memory", last)) for x, y, last in found]
        found += [(f"NCCL: {x}", y, exchanged_by("all_to_all", last)) for x, y, last in named]
    prompts = prefill_cases.PROBLEMS.items()
    found += [(f"prefill, {name}", prefill_error, problem) for name, problem in prompts]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU, or on a CPU")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th problem, from the I-th on")
    parser.add_argument("--only", default="", help="problems with this in their names")
    limit = "start no problem after so many seconds, and fail"
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help=limit)
    options, began = parser.parse_args(), time.monotonic()
    shared, (first, parts) = options.one_gpu, map(int, options.part.split("/"))
    device = "cuda:0" if shared else f"cuda:{os.environ['LOCAL_RANK']}"
    if shared and not torch.cuda.is_available():
        device = "cpu"
    else:
        torch.cuda.set_device(device)
    faulthandler.enable()  # NCCL ends a process by a signal
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    group = ThroughHost() if shared else RankGroup()
    found = [each for each in problems(shared) if options.only in each[0]]
    assert found, f"no problem has {options.only!r} in its name on this device"
    wrong = []
    for name, error, problem in found[first - 1 :: parts]:
        elapsed = largest(group, time.monotonic() - began, device)
        if elapsed > options.limit_seconds:
            wrong.append(f"not run: {name} and those after it")
            break
        if group.rank == 0:
            print(f"{elapsed:.0f} s, {name}: ", end="", flush=True)
        worst = largest(group, error(in_bfloat16(problem), group, device), device)
        if not worst <= LIMIT:
            wrong.append(name)
        if group.rank == 0:
            print(f"error {worst:.2g}", flush=True)
    dist.destroy_process_group()  # all ranks know the same, and end alike
    assert not wrong, f"errors above {LIMIT}: {wrong}"


def decode_error(problem: Problem, group: RankGroup, device: str) -> float:
    return Run(problem, group, device).largest_error()


def prefill_error(problem: Problem, group: RankGroup, device: str) -> float:
    run = prefill_cases.Run(problem, group, device)
    steps = [prefill_cases.LENGTHS[each] for each in prefill_cases.CHUNKS]
    found = max(error_of(*run.step(each)) for each in steps)
    assert not run.wrong_keys(steps[-1])
    return found


def largest(group: RankGroup, value: float, device: str) -> float:
    """Of all ranks, and not a number if one of them is none."""
    return group.all_gather(torch.tensor([value], device=device)).max().item()


if __name__ == "__main__":
    main()
