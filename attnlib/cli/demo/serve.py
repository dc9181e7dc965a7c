"""The serving loop of the demo: schedule, build, run and sample until every request is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attnlib.cache.hybrid_allocator import HybridBlockAllocator
from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.scheduler import Chunk, Request, Scheduler
from attnlib.integrations.transformers.paged_batches import StepBatch
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.groups import group_batches

__all__ = ["ServingResult", "blocks_of", "serve", "warm_up"]


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
    *,
    keeps_logits: bool = True,
) -> ServingResult:
    """Serve all requests by greedy decoding; their tokens are in `generated` afterwards.

    Args:
        paged, scheduler, requests: the model, and what it serves.
        on_step: called after every step.
        keeps_logits: copy the logits of every token to the host.

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
            served.peak_blocks = max(served.peak_blocks, scheduler.allocator.pool.num_used_blocks)
            _run(paged, scheduler, plan, served.logits if keeps_logits else None)
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
    blocks = blocks_of(paged)
    limits = (scheduler.token_budget, scheduler.max_num_reqs)
    return serve(paged, Scheduler(blocks, *limits), copies).seconds


def blocks_of(paged: PagedModel) -> PlainBlocks | HybridBlockAllocator:
    """An allocator of all blocks of a model."""
    if paged.hybrid:
        return HybridBlockAllocator(paged.groups, paged.num_blocks)
    return PlainBlocks(paged.num_blocks, paged.block_size)


def _run(
    paged: PagedModel,
    scheduler: Scheduler,
    plan: list[Chunk],
    logits_of: dict[int, list[torch.Tensor]] | None,
) -> None:
    device = next(paged.model.parameters()).device
    counts = [chunk.count for chunk in plan]
    held = [chunk.request.blocks for chunk in plan if chunk.request.blocks is not None]
    batch: StepBatch
    if isinstance(scheduler.allocator, HybridBlockAllocator):
        batch = group_batches(scheduler.allocator, held, counts, device)
    else:
        batch = CommonAttentionMetadata.from_lengths(
            counts,
            [chunk.start + chunk.count for chunk in plan],
            [one.blocks[""] for one in held],
            paged.block_size,
            device,
        )
    ids = [
        token
        for chunk in plan
        for token in chunk.request.tokens[chunk.start : chunk.start + chunk.count]
    ]
    positions = [
        position for chunk in plan for position in range(chunk.start, chunk.start + chunk.count)
    ]
    ends = torch.tensor(counts).cumsum(0) - 1
    sampling = [index for index, chunk in enumerate(plan) if chunk.samples]
    rows = ends[sampling].long()
    logits = paged.step(
        torch.tensor(ids, device=device), torch.tensor(positions, device=device), batch, rows
    )
    chosen = logits.argmax(-1).tolist()
    next_tokens = dict(zip(sampling, chosen, strict=True))
    if logits_of is not None:
        for index, row in zip(sampling, logits.float().cpu(), strict=True):
            logits_of[plan[index].request.index].append(row)
    for index, chunk in enumerate(plan):
        scheduler.finish(chunk, next_tokens.get(index))
