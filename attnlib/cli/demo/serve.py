"""The engine of the demo: plan, build, run, sample, until every request is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attnlib.cache.allocator import BlockAllocator
from attnlib.cli.demo.scheduler import Request, Scheduler, Work
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["Served", "serve", "warm_up"]


@dataclass
class Served:
    """What came out of it.

    Attributes:
        logits: for each request, the logits of each token that it generated, `[vocabulary]` float32 on the CPU.
        seconds: wall time of all steps.
        steps: how many there were.
        computed_tokens: tokens that went through the model.
        peak_blocks: most blocks in use at once.
        preemptions: requests that had to give their blocks back.
    """

    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0
    computed_tokens: int = 0
    peak_blocks: int = 0
    preemptions: int = 0


def serve(
    paged: PagedModel,
    scheduler: Scheduler,
    requests: list[Request],
    on_step: Callable[[Served], None] | None = None,
) -> Served:
    """Serve all requests by greedy decoding; each ends with its tokens in `generated`.

    Raises:
        CacheExhaustedError: a request could never fit the cache.
    """
    served = Served(logits={request.index: [] for request in requests})
    for request in requests:
        scheduler.add(request)
    began = time.perf_counter()
    with paged.attached():
        while scheduler.is_busy:
            plan = scheduler.plan()
            served.peak_blocks = max(served.peak_blocks, scheduler.allocator.num_used_blocks)
            _run(paged, scheduler, plan, served)
            served.steps += 1
            served.computed_tokens += sum(work.count for work in plan)
            if on_step is not None:
                on_step(served)
    served.seconds, served.preemptions = time.perf_counter() - began, scheduler.num_preemptions
    return served


def warm_up(paged: PagedModel, scheduler: Scheduler, requests: list[Request]) -> float:
    """Serve copies of the requests from a pool of their own, so that what is timed afterwards compiles nothing; returns the seconds it took.

    The copies leave their keys and values in the same caches, where the real run finds them as garbage (P5).
    """
    copies = [
        Request(request.index, request.prompt, request.max_new_tokens) for request in requests
    ]
    pool = BlockAllocator(scheduler.allocator.num_blocks, scheduler.allocator.block_size)
    return serve(
        paged, Scheduler(pool, scheduler.token_budget, scheduler.max_num_reqs), copies
    ).seconds


def _run(paged: PagedModel, scheduler: Scheduler, plan: list[Work], served: Served) -> None:
    device = next(paged.model.parameters()).device
    batch = CommonAttentionMetadata.from_lengths(
        query_lens=[work.count for work in plan],
        seq_lens=[work.start + work.count for work in plan],
        block_table=[work.request.blocks for work in plan],
        block_size=paged.block_size,
        device=device,
    )
    ids = [
        token
        for work in plan
        for token in work.request.tokens[work.start : work.start + work.count]
    ]
    positions = [
        position for work in plan for position in range(work.start, work.start + work.count)
    ]
    ends = batch.query_start_loc_cpu[1:] - 1
    sampling = [index for index, work in enumerate(plan) if work.samples]
    rows = ends[sampling].long().to(device)
    logits = paged.step(
        torch.tensor(ids, device=device), torch.tensor(positions, device=device), batch, rows
    )
    chosen = logits.argmax(-1).tolist()
    kept = logits.float().cpu()
    next_tokens = dict(zip(sampling, chosen, strict=True))
    for row, index in enumerate(sampling):
        served.logits[plan[index].request.index].append(kept[row])
    for index, work in enumerate(plan):
        scheduler.finish(work, next_tokens.get(index))
