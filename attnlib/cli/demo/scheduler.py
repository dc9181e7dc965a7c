"""A small continuous-batching scheduler: the tokens of each step and the blocks that they use.

Decodes come first, so that a running request never waits for a prompt. The rest of the token budget
goes to prompts, in chunks. A prompt that shares a prefix with an earlier one reuses its blocks. If
no block is free, the most recent request is preempted and computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from attnlib.cache.allocator import BlockAllocator
from attnlib.errors import CacheExhaustedError

__all__ = ["Request", "Scheduler", "Chunk"]


@dataclass(eq=False)
class Request:
    """One prompt and its state.

    Attributes:
        index: its number.
        prompt: token ids.
        max_new_tokens: largest number of tokens to generate.
        end_tokens: tokens that end the request; the last generated token may be one.
        generated: token ids generated so far.
        blocks: its blocks, in order.
        num_computed: number of tokens whose keys and values are in the cache.
        num_reused: number of tokens whose keys and values another request computed.
        was_preempted: its blocks were taken; later hits in the cache may be its own.
        slot: its place among the running requests, for the states of state layers; -1 for none.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    end_tokens: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_reused: int = 0
    was_preempted: bool = False
    slot: int = -1

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

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
    """Schedules steps over one block allocator.

    Args:
        allocator: the blocks.
        token_budget: maximum number of tokens of one step.
        max_num_reqs: maximum number of running requests.
        reuse_prefixes: take the blocks of a prefix that another request has computed. Not for
            models with state layers: the keys of a prefix are of no use without its states.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        token_budget: int,
        max_num_reqs: int,
        reuse_prefixes: bool = True,
    ) -> None:
        self.allocator = allocator
        self.reuse_prefixes = reuse_prefixes
        self._free_slots = list(range(max_num_reqs))
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
        max_blocks = -(
            -(len(request.prompt) + request.max_new_tokens - 1) // self.allocator.block_size
        )
        if max_blocks > self.allocator.num_blocks:
            raise CacheExhaustedError(
                f"request {request.index} can grow to {max_blocks} blocks of "
                f"{self.allocator.block_size} tokens, the cache has {self.allocator.num_blocks}: "
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
            count = min(request.num_pending, budget)
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
        request = chunk.request
        request.num_computed += chunk.count
        if self.reuse_prefixes:
            self.allocator.commit(request.tokens[: request.num_computed], request.blocks)
        if next_token is not None:
            request.generated.append(next_token)
        if request.is_done:
            self._release(request)

    def _admit(self, budget: int) -> Chunk | None:
        request = self.waiting[0]
        known = request.tokens if self.reuse_prefixes else []
        hit = self.allocator.acquire_prefix(known)
        request.blocks, request.num_computed = list(hit.block_ids), hit.num_tokens
        count = min(request.num_pending, budget)
        need = self._num_new_blocks(request, count)
        if need > self.allocator.num_free_blocks:
            self.allocator.free(request.blocks)
            request.blocks, request.num_computed = [], 0
            return None
        if not request.was_preempted:
            request.num_reused = hit.num_tokens
        request.blocks += self.allocator.allocate(need)
        self.running.append(self.waiting.popleft())
        request.slot = self._free_slots.pop(0)
        return Chunk(request, request.num_computed, count)

    def _grow(self, request: Request, count: int) -> bool:
        """Allocate blocks for `count` tokens, preempting the most recent requests if needed.

        Returns False if the request itself was preempted.
        """
        while self._num_new_blocks(request, count) > self.allocator.num_free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.allocator.allocate(self._num_new_blocks(request, count))
        return True

    def _num_new_blocks(self, request: Request, count: int) -> int:
        return -(-(request.num_computed + count) // self.allocator.block_size) - len(request.blocks)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.free(request.blocks)
        self._free_slots.append(request.slot)
        request.blocks, request.slot = [], -1

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed, request.was_preempted = 0, True
        self.waiting.appendleft(request)
        self.num_preemptions += 1
