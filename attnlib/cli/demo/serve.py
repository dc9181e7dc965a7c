"""The serving loop of the demo: schedule, build, run and sample until every request is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attnlib.cache.allocator import BlockAllocator
from attnlib.cli.demo.scheduler import Chunk, Request, Scheduler
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["ServingResult", "serve", "warm_up"]


@dataclass
class ServingResult:
    """Logits and statistics of a run.

    Attributes:
        logits: request index -> logits of each generated token, `[vocabulary]` float32 on the CPU.
        seconds: wall time of all steps.
        steps: number of steps.
        peak_blocks: largest number of blocks in use.
        preemptions: number of preemptions.
    """

    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0
    peak_blocks: int = 0
    preemptions: int = 0


def serve(
    paged: PagedModel,
    scheduler: Scheduler,
    requests: list[Request],
    on_step: Callable[[ServingResult], None] | None = None,
) -> ServingResult:
    """Serve all requests by greedy decoding; their tokens are in `generated` afterwards.

    Raises:
        CacheExhaustedError: a request does not fit the cache, even alone.
    """
    served = ServingResult(logits={request.index: [] for request in requests})
    for request in requests:
        scheduler.add(request)
    began = time.perf_counter()
    with paged.attached():
        while scheduler.is_busy:
            plan = scheduler.plan()
            served.peak_blocks = max(served.peak_blocks, scheduler.allocator.num_used_blocks)
            _run(paged, scheduler, plan, served)
            served.steps += 1
            if on_step is not None:
                on_step(served)
    served.seconds, served.preemptions = time.perf_counter() - began, scheduler.num_preemptions
    return served


def warm_up(paged: PagedModel, scheduler: Scheduler, requests: list[Request]) -> float:
    """Serve copies of the requests with another block allocator, so that the timed run compiles
    nothing.

    The copies leave keys and values in the same caches; the timed run must ignore them (P5).

    Returns:
        The seconds that it took.
    """
    copies = [
        Request(request.index, request.prompt, request.max_new_tokens, request.end_tokens)
        for request in requests
    ]
    pool = BlockAllocator(scheduler.allocator.num_blocks, scheduler.allocator.block_size)
    limits = (scheduler.token_budget, scheduler.max_num_reqs, scheduler.reuse_prefixes)
    return serve(paged, Scheduler(pool, *limits), copies).seconds


def _run(paged: PagedModel, scheduler: Scheduler, plan: list[Chunk], served: ServingResult) -> None:
    device = next(paged.model.parameters()).device
    batch = CommonAttentionMetadata.from_lengths(
        query_lens=[chunk.count for chunk in plan],
        seq_lens=[chunk.start + chunk.count for chunk in plan],
        block_table=[chunk.request.blocks for chunk in plan],
        block_size=paged.block_size,
        device=device,
        state_slots=[chunk.request.slot for chunk in plan] if paged.states.modules else None,
    )
    ids = [
        token
        for chunk in plan
        for token in chunk.request.tokens[chunk.start : chunk.start + chunk.count]
    ]
    positions = [
        position for chunk in plan for position in range(chunk.start, chunk.start + chunk.count)
    ]
    ends = batch.query_lens_cpu.cumsum(0) - 1
    sampling = [index for index, chunk in enumerate(plan) if chunk.samples]
    rows = ends[sampling].long()
    logits = paged.step(
        torch.tensor(ids, device=device), torch.tensor(positions, device=device), batch, rows
    )
    chosen = logits.argmax(-1).tolist()
    kept = logits.float().cpu()
    next_tokens = dict(zip(sampling, chosen, strict=True))
    for row, index in enumerate(sampling):
        served.logits[plan[index].request.index].append(kept[row])
    for index, chunk in enumerate(plan):
        scheduler.finish(chunk, next_tokens.get(index))
