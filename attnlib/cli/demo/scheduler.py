"""Continuous batching in small: who computes how many tokens in the next step, and in which blocks.

Decodes go first, so that a running request never waits for a prompt; what is left of the token budget goes to prompts, in chunks. A prompt that
starts like an earlier one takes that one's blocks. When no block is free, the youngest request gives its blocks back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from attnlib.cache.allocator import BlockAllocator
from attnlib.errors import CacheExhaustedError

__all__ = ["Request", "Scheduler", "Work"]


@dataclass(eq=False)
class Request:
    """One prompt on its way.

    Attributes:
        index: its number.
        prompt: token ids.
        max_new_tokens: how many tokens it may generate.
        generated: token ids so far.
        blocks: the blocks that it holds, in order.
        num_computed: tokens whose keys and values are in the cache.
        num_reused: of those, how many were found there.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_reused: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed yet; 1 for a decode."""
        return len(self.prompt) + len(self.generated) - self.num_computed

    @property
    def is_done(self) -> bool:
        """True when nothing is left to generate."""
        return len(self.generated) >= self.max_new_tokens


@dataclass(frozen=True)
class Work:
    """A request's share of one step: its tokens [start, start + count)."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """True when the last of these tokens is the request's last: its logits give the next one."""
        return self.start + self.count == len(self.request.prompt) + len(self.request.generated)


class Scheduler:
    """Plans steps over one block allocator.

    Args:
        allocator: the pool.
        token_budget: most tokens of one step.
        max_num_reqs: most requests that run at once.
    """

    def __init__(self, allocator: BlockAllocator, token_budget: int, max_num_reqs: int) -> None:
        self.allocator = allocator
        self.token_budget = token_budget
        self.max_num_reqs = max_num_reqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheExhaustedError: it could never fit the pool, even alone.
        """
        most = -(-(len(request.prompt) + request.max_new_tokens - 1) // self.allocator.block_size)
        if most > self.allocator.num_blocks:
            raise CacheExhaustedError(
                f"request {request.index} can grow to {most} blocks of {self.allocator.block_size} tokens, the cache has "
                f"{self.allocator.num_blocks}: allocate a larger cache, or generate fewer tokens"
            )
        self.waiting.append(request)

    @property
    def is_busy(self) -> bool:
        """True while some request is not done."""
        return bool(self.waiting or self.running)

    def plan(self) -> list[Work]:
        """The next step: decodes first, then chunks of prompts. Blocks for all of it are held when this returns."""
        budget = self.token_budget
        decodes: list[Work] = []
        chunks: list[Work] = []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue  # preempted by an earlier one of this step, or no budget left
            count = min(request.num_pending, budget)
            if not self._grow(request, count):
                continue
            (decodes if request.num_pending == 1 else chunks).append(
                Work(request, request.num_computed, count)
            )
            budget -= count
        while budget and self.waiting and len(self.running) < self.max_num_reqs:
            work = self._admit(budget)
            if work is None:
                break
            chunks.append(work)
            budget -= work.count
        return [work for work in (*decodes, *chunks) if work.request in self.running]

    def finish(self, work: Work, next_token: int | None) -> None:
        """Record that a share of the step is computed, and the token that came of it."""
        request = work.request
        request.num_computed += work.count
        self.allocator.commit(request.tokens[: request.num_computed], request.blocks)
        if next_token is not None:
            request.generated.append(next_token)
        if request.is_done:
            self.running.remove(request)
            self.allocator.free(request.blocks)
            request.blocks = []

    def _admit(self, budget: int) -> Work | None:
        request = self.waiting[0]
        hit = self.allocator.acquire_prefix(request.tokens)
        request.blocks, request.num_computed = list(hit.block_ids), hit.num_tokens
        count = min(request.num_pending, budget)
        need = self._missing(request, count)
        if need > self.allocator.num_free_blocks:
            self.allocator.free(request.blocks)
            request.blocks, request.num_computed = [], 0
            return None
        request.num_reused = max(request.num_reused, hit.num_tokens)
        request.blocks += self.allocator.allocate(need)
        self.running.append(self.waiting.popleft())
        return Work(request, request.num_computed, count)

    def _grow(self, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens; the youngest others give theirs back if they must. False when the request itself had to."""
        while self._missing(request, count) > self.allocator.num_free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.allocator.allocate(self._missing(request, count))
        return True

    def _missing(self, request: Request, count: int) -> int:
        return -(-(request.num_computed + count) // self.allocator.block_size) - len(request.blocks)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.free(request.blocks)
        request.blocks, request.num_computed = [], 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1
