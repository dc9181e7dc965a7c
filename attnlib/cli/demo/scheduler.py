"""A small continuous-batching scheduler: the tokens of each step and the blocks that they use.

Decodes come first, so that a running request never waits for a prompt. The rest of the token budget
goes to prompts, in chunks. A prompt that shares a prefix with an earlier one reuses its blocks. If
no block is free, the most recent request is preempted and computed again later.

Over states, a prefix can be reused where a checkpoint was kept: at the last boundary of blocks in
each prompt, and where a prompt departs from an earlier one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from attnlib.cache.hybrid_allocator import HybridBlockAllocator, SequenceBlocks
from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.errors import CacheExhaustedError

__all__ = ["Chunk", "Request", "Scheduler", "most_blocks"]


@dataclass(eq=False)
class Request:
    """One prompt and its state.

    Attributes:
        index: its number.
        prompt: token ids.
        max_new_tokens: largest number of tokens to generate.
        end_tokens: tokens that end the request; the last generated token may be one.
        generated: token ids generated so far.
        blocks: its blocks; None before it runs.
        checkpoints: where it keeps its states for others.
        num_reused: number of tokens whose keys and values another request computed.
        was_preempted: its blocks were taken; later hits in the cache may be its own.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    end_tokens: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    blocks: SequenceBlocks | None = None
    checkpoints: frozenset[int] = frozenset()
    num_reused: int = 0
    was_preempted: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def num_computed(self) -> int:
        """Number of tokens whose keys and values are in the cache."""
        return 0 if self.blocks is None else self.blocks.num_computed

    @property
    def num_pending(self) -> int:
        """Number of known tokens that are not computed yet; 1 for a decode."""
        return len(self.prompt) + len(self.generated) - self.num_computed

    @property
    def is_done(self) -> bool:
        """True if all tokens are generated."""
        return len(self.generated) >= self.max_new_tokens or (
            bool(self.generated) and self.generated[-1] in self.end_tokens
        )


@dataclass(frozen=True)
class Chunk:
    """The tokens [start, start + count) of a request, computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """True if the chunk ends with the last known token, whose logits give the next one."""
        return self.start + self.count == len(self.request.prompt) + len(self.request.generated)


class Scheduler:
    """Schedules steps over the blocks of one allocator.

    Args:
        allocator: the blocks.
        token_budget: maximum number of tokens of one step.
        max_num_reqs: maximum number of running requests.
    """

    def __init__(
        self,
        allocator: PlainBlocks | HybridBlockAllocator,
        token_budget: int,
        max_num_reqs: int,
    ) -> None:
        self.allocator = allocator
        self.token_budget = token_budget
        self.max_num_reqs = max_num_reqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheExhaustedError: it does not fit the cache, even alone.
        """
        most, pool = most_blocks(self.allocator, request), self.allocator.pool
        if most > (usable := pool.num_free_blocks + pool.num_used_blocks):
            raise CacheExhaustedError(
                f"request {request.index} can grow to {most} blocks, the cache has {usable}: "
                "allocate a larger cache, or generate fewer tokens"
            )
        self.waiting.append(request)

    @property
    def is_busy(self) -> bool:
        """True while a request is not done."""
        return bool(self.waiting or self.running)

    def plan(self) -> list[Chunk]:
        """The chunks of the next step, decodes first.

        Their blocks are allocated when this returns.
        """
        budget = self.token_budget
        decodes: list[Chunk] = []
        chunks: list[Chunk] = []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue  # preempted in this step, or no budget left
            count = _count(request, budget)
            if not self._grow(request, count):
                continue
            (decodes if request.num_pending == 1 else chunks).append(
                Chunk(request, request.num_computed, count)
            )
            budget -= count
        while budget and self.waiting and len(self.running) < self.max_num_reqs:
            chunk = self._admit(budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.count
        return [chunk for chunk in (*decodes, *chunks) if chunk.request in self.running]

    def finish(self, chunk: Chunk, next_token: int | None) -> None:
        """Record that a chunk was computed, and the next token if it was sampled."""
        request, end = chunk.request, chunk.start + chunk.count
        assert request.blocks is not None
        self.allocator.advance(request.blocks, request.tokens[:end])
        if end in request.checkpoints and isinstance(self.allocator, HybridBlockAllocator):
            self.allocator.keep(request.blocks)
        if next_token is not None:
            request.generated.append(next_token)
        if request.is_done:
            self._release(request)

    def _admit(self, budget: int) -> Chunk | None:
        request = self.waiting[0]
        blocks = request.blocks = self.allocator.start(request.tokens)
        request.checkpoints = self._checkpoints(request)
        count, reused = _count(request, budget), blocks.num_computed
        missing = self.allocator.num_missing_blocks(blocks, reused + count)
        if missing > self.allocator.pool.num_free_blocks:
            self.allocator.release(blocks)
            request.blocks = None
            return None
        if not request.was_preempted:
            request.num_reused = reused
        self.allocator.grow(blocks, reused + count)
        self.running.append(self.waiting.popleft())
        return Chunk(request, reused, count)

    def _checkpoints(self, request: Request) -> frozenset[int]:
        """Where a request that starts keeps its states."""
        blocks, allocator = request.blocks, self.allocator
        if blocks is None or not blocks.states.slots or not blocks.blocks:
            return frozenset()
        assert isinstance(allocator, HybridBlockAllocator)
        size = allocator.common_block_size
        return frozenset((blocks.num_cached_keys, (len(request.tokens) - 1) // size * size))

    def _grow(self, request: Request, count: int) -> bool:
        """Allocate blocks for `count` tokens, preempting the most recent requests if needed.

        Returns False if the request itself was preempted.
        """
        blocks, end = request.blocks, request.num_computed + count
        assert blocks is not None
        pool = self.allocator.pool
        while self.allocator.num_missing_blocks(blocks, end) > pool.num_free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self.allocator.grow(blocks, end)
        return True

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        if request.blocks is not None:
            self.allocator.release(request.blocks)
        request.blocks = None

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.was_preempted = True
        self.waiting.appendleft(request)
        self.num_preemptions += 1


def most_blocks(allocator: PlainBlocks | HybridBlockAllocator, request: Request) -> int:
    """Blocks that a request needs at its end. The last token is not computed."""
    num_tokens = len(request.prompt) + request.max_new_tokens - 1
    return allocator.num_missing_blocks(allocator.start(), num_tokens)


def _count(request: Request, budget: int) -> int:
    """Tokens of the next chunk of a request, which ends at its next checkpoint at the latest."""
    count = min(request.num_pending, budget)
    ends = (end - request.num_computed for end in request.checkpoints)
    return min((end for end in ends if 0 < end < count), default=count)
