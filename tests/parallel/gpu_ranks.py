"""Divided layers on several GPUs, with NCCL and CUDA graphs; run by `test_attention_gpus.py`.

torchrun --nproc-per-node 2 -m tests.parallel.gpu_ranks
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from attnlib.parallel import RankGroup, divided_batch
from tests.parallel.cases import PROBLEMS
from tests.parallel.problem import STEPS, Problem, Run, error_of

LIMIT = 0.05
"""In bfloat16, of numbers of about 3: two roundings of results, and one of each part."""


def in_bfloat16(problem: Problem) -> Problem:
    """The same layer in the dtype and with head sizes of the GPU's kernels."""
    sizes = {"head_size": 64}
    if problem.spec.get("use_mla"):
        sizes = {"head_size": 576, "head_size_v": 512}
    return replace(problem, spec={**problem.spec, **sizes, "dtype": torch.bfloat16})


def replays(group: RankGroup, device: str) -> None:
    """A graph of a decode follows batches of the same sizes."""
    run = Run(in_bfloat16(Problem({"has_sink": True})), group, device)
    for name in ("prefill", "mixed", "decode"):
        run.step(STEPS[name])
    first, second = ([end + n for _, end in STEPS["decode"]] for n in (1, 2))
    builder, ones = run.builders[1], [1] * 4

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
    state = run.random.get_state()
    query, key, value = run.tensors(4)
    run.random.set_state(state)
    for tensor, given in zip(inputs, (run.own(query), key, value), strict=True):
        tensor.copy_(given)
    builder.build(batch(second))
    graph.replay()
    replayed = out.clone(), lse.clone()
    found = run.step(list(zip(ones, second, strict=True)))
    error = error_of(*replayed, *found[2:])
    assert error <= LIMIT, f"replay: error {error}"


def main() -> None:
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group = RankGroup()
    for name, problem in PROBLEMS.items():
        error = Run(in_bfloat16(problem), group, device).largest_error()
        assert error <= LIMIT, f"{name}: error {error}"
        if group.rank == 0:
            print(f"{name}: error {error:.2g}")
    replays(group, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
