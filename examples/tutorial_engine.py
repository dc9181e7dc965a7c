"""A small continuous-batching engine for Gemma 3, built from the parts of attnlib.

    python -m examples.tutorial_engine

The tutorial in docs/guides/tutorial-engine.md explains it section by section.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnlib
from attnlib.ops import HeadNorm
from examples.gemma3 import Decoder, load


@dataclass(eq=False)
class Request:
    """One prompt and its generated tokens."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # physical blocks, in order
    num_computed: int = 0  # tokens whose keys and values are in the cache

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet; 1 for a decode."""
        return len(self.tokens) - self.num_computed

    def choose(self, logits: Tensor, position: int) -> int:
        """The token at a position. It depends on seed and position, not on the batch."""
        if self.temperature == 0:
            return int(logits.argmax())
        generator = torch.Generator().manual_seed(self.seed + position)
        weights = (logits / self.temperature).softmax(-1).cpu()
        return int(torch.multinomial(weights, 1, generator=generator))


class Engine:
    """Continuous batching with chunked prefill, prefix reuse and preemption."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int = 12,
        block_size: int = 8,
        token_budget: int = 64,
        max_num_reqs: int = 4,
        device: str = "cpu",
    ) -> None:
        self.model, self.device = model, device
        self.token_budget, self.max_num_reqs = token_budget, max_num_reqs
        limits = attnlib.BatchLimits(
            max_num_reqs=max_num_reqs,
            max_num_tokens=token_budget,
            max_seq_len=num_blocks * block_size,
        )
        config = model.config
        spec = attnlib.AttentionSpec(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            dtype=torch.float32,
            block_size=block_size,
        )
        self.specs = {
            "full_attention": spec,
            "sliding_attention": spec.replace(sliding_window=config["sliding_window"]),
        }
        specs = [self.specs[kind] for kind in model.kinds]
        self.caches = [attnlib.PagedKVCache.allocate(one, num_blocks, device) for one in specs]
        self.norms = [
            [HeadNorm(norm.weight.detach(), multiply_in_float32=True) for norm in norms]
            for norms in ((layer.q_norm, layer.k_norm) for layer in model.layers)
        ]
        self.make_layers(specs, limits)
        self.allocator = attnlib.BlockAllocator(num_blocks, block_size)
        self.table = attnlib.BlockTable(max_num_reqs, num_blocks, device)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_steps = self.num_reused_tokens = self.num_preemptions = 0

    def make_layers(self, specs: list[attnlib.AttentionSpec], limits: attnlib.BatchLimits) -> None:
        self.layers = [attnlib.Attention(one, device=self.device) for one in specs]
        self.builders = {}
        for kind, one in self.specs.items():
            number = self.model.kinds.index(kind)
            layer, cache = self.layers[number], self.caches[number]
            self.builders[kind] = layer.backend.make_builder(one, self.device, limits=limits)
            attnlib.warmup(layer, cache, limits, builder=self.builders[kind])

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of the next step with their numbers of new tokens, decodes first."""
        batch: list[tuple[Request, int]] = []
        budget = self.token_budget
        for request in list(self.running):  # oldest first
            count = self.chunk(request, budget) if request in self.running else 0
            if count and self.reserve(request, count):
                batch.append((request, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            self.start(request)
            count = self.chunk(request, budget)
            if self.num_missing_blocks(request, count) > self.allocator.num_free_blocks:
                self.release(request)
                break
            self.grow(request, count)
            self.running.append(self.waiting.popleft())
            self.num_reused_tokens += request.num_computed
            batch.append((request, count))
            budget -= count
        return sorted(batch, key=lambda item: item[1] > 1)

    def chunk(self, request: Request, budget: int) -> int:
        return min(request.num_pending, budget)

    def reserve(self, request: Request, count: int) -> bool:
        """Allocate blocks for `count` more tokens; preempt the newest requests if none are free."""
        while self.num_missing_blocks(request, count) > self.allocator.num_free_blocks:
            newest = self.running.pop()
            self.release(newest)
            self.waiting.appendleft(newest)
            self.num_preemptions += 1
            if newest is request:
                return False
        self.grow(request, count)
        return True

    def start(self, request: Request) -> None:
        hit = self.allocator.acquire_prefix(request.tokens)
        request.blocks, request.num_computed = list(hit.block_ids), hit.num_tokens

    def grow(self, request: Request, count: int) -> None:
        request.blocks += self.allocator.allocate(self.num_missing_blocks(request, count))

    def num_missing_blocks(self, request: Request, count: int) -> int:
        needed = -(-(request.num_computed + count) // self.allocator.block_size)
        return needed - len(request.blocks)

    def release(self, request: Request) -> None:
        self.allocator.free(request.blocks)
        request.blocks, request.num_computed = [], 0

    def step(self) -> None:
        """Run the model on one batch and append the sampled tokens."""
        batch = self.schedule()
        tokens: list[int] = []
        positions: list[int] = []
        for request, count in batch:
            span = range(request.num_computed, request.num_computed + count)
            tokens += request.tokens[span.start : span.stop]
            positions += span
        query_lens = [count for _, count in batch]
        metadata = self.metadata(batch, query_lens)
        with torch.no_grad():
            hidden = self.model(
                torch.tensor(tokens, device=self.device),
                torch.tensor(positions, device=self.device),
                partial(self.attend, metadata),
            )
            last = torch.tensor(query_lens, device=self.device).cumsum(0) - 1  # of each request
            logits = self.model.logits(hidden[last])
        for (request, count), row in zip(batch, logits, strict=True):
            self.advance(request, count)
            if request.num_pending == 0:  # otherwise more chunks of the prompt follow
                request.generated.append(request.choose(row, len(request.tokens)))
                if len(request.generated) == request.max_new_tokens:
                    self.running.remove(request)
                    self.release(request)
        self.num_steps += 1

    def advance(self, request: Request, count: int) -> None:
        request.num_computed += count
        self.allocator.commit(request.tokens[: request.num_computed], request.blocks)

    def metadata(self, batch: list[tuple[Request, int]], query_lens: list[int]) -> dict[str, Any]:
        for row, (request, _) in enumerate(batch):
            self.table.add_row(request.blocks, row)
        seq_lens = [request.num_computed + count for request, count in batch]
        return self.build(query_lens, seq_lens, self.table.commit(len(batch)))

    def build(self, query_lens: list[int], seq_lens: list[int], table: Tensor) -> dict[str, Any]:
        """The metadata of a batch for each kind of layer."""
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, self.allocator.block_size, self.device
        )
        return {kind: builder.build(0, common) for kind, builder in self.builders.items()}

    def attend(
        self,
        metadata: dict[str, Any],
        number: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Normalize and rotate queries and keys, write keys and values, and attend."""
        layer, cache = self.layers[number], self.caches[number]
        step = metadata[self.model.kinds[number]]
        q_norm, k_norm = self.norms[number]
        q = layer.rotate_and_write_kv(q, k, v, cache, step, cos, sin, q_norm=q_norm, k_norm=k_norm)
        return layer(q, None, None, cache, step)

    def serve(self, requests: list[Request]) -> None:
        """Run until all requests are complete."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()


def dense_attention(model: Decoder, positions: Tensor) -> Callable[..., Tensor]:
    """The attention of a model without a cache."""
    distance = positions[:, None] - positions

    def rotate(x: Tensor, norm: nn.Module, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = norm(x).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layer, is_windowed = model.layers[number], model.kinds[number] == "sliding_attention"
        heads = (x.unflatten(-1, (-1, model.config["head_dim"])) for x in (q, k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in heads)
        q, k = rotate(q, layer.q_norm, cos, sin), rotate(k, layer.k_norm, cos, sin)
        limit = model.config["sliding_window"] if is_windowed else len(positions)
        mask = (distance >= 0) & (distance < limit)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    return attend


def dense_reference(
    model: Decoder,
    request: Request,
    attention: Callable[[Decoder, Tensor], Callable[..., Tensor]] = dense_attention,
) -> list[int]:
    """The tokens that attention without a cache chooses after each prefix."""
    positions = torch.arange(len(request.tokens) - 1)
    with torch.no_grad():
        hidden = model(torch.tensor(request.tokens[:-1]), positions, attention(model, positions))
        logits = model.logits(hidden[len(request.prompt) - 1 :])
    return [request.choose(row, len(request.prompt) + i) for i, row in enumerate(logits)]


PREFIX = "A list of facts.\nIron is a metal.\nThe sun is a star.\n"


def make_requests(encode: Callable[[str], list[int]]) -> list[Request]:
    """Prompts of different lengths with a common prefix; every third request is sampled."""
    texts = (
        "Paris is the capital of",
        "A spider has eight legs, and an ant has",
        "Water boils at a temperature of",
        "The days of the week are Monday, Tuesday,",
        "An engine serves many requests at once, so that",
        "Once upon a time, in a small village by the sea, there lived",
    )
    return [
        Request(
            encode(PREFIX + text),
            max_new_tokens=8 + index,
            temperature=0.8 * (index % 3 == 2),
            seed=1000 * index,
        )
        for index, text in enumerate(texts)
    ]


def main() -> None:
    model, encode, decode = load()
    engine, requests = Engine(model), make_requests(encode)
    engine.serve(requests)
    for request in requests if decode else []:
        prompt = decode(request.prompt).removeprefix(PREFIX)
        print(f"{prompt} ->{decode(request.generated)!r}")
    tokens = sum(len(request.generated) for request in requests)
    print(f"{len(requests)} requests, {tokens} tokens, {engine.num_steps} steps")
    print(f"{engine.num_reused_tokens} tokens reused, preemptions: {engine.num_preemptions}")
    equal = all(request.generated == dense_reference(model, request) for request in requests)
    print("equal to the dense reference:", equal)


if __name__ == "__main__":
    main()
