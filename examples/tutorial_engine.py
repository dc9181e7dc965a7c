"""A small continuous-batching engine over a tiny decoder, built from the parts of attnlib.

    python examples/tutorial_engine.py

The tutorial in docs/guides/tutorial-engine.md explains it section by section.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnlib
from attnlib.ops import HeadNorm

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, LAYERS, VOCABULARY = 4, 2, 16, 64, 2, 97


class TinyDecoder(nn.Module):
    """A decoder with random weights. `attend(layer, q, k, v, cos, sin)` normalizes and rotates the
    heads of queries and keys, and computes attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, sum(self.sizes)) for _ in range(LAYERS))
        self.norms = nn.ParameterList(torch.empty(2, HEAD_SIZE) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_SIZE, HIDDEN) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.tokens(tokens)
        steps = torch.arange(HEAD_SIZE // 2, device=positions.device) / (HEAD_SIZE // 2)
        angles = positions[:, None] * 1000.0**-steps
        cos, sin = angles.cos(), angles.sin()  # once per step, for all layers
        for layer in range(LAYERS):
            q, k, v = self.qkv[layer](F.rms_norm(x, (HIDDEN,))).split(self.sizes, dim=-1)
            x = x + self.out[layer](attend(layer, q, k, v, cos, sin))
            x = x + self.mlp[layer](F.silu(F.rms_norm(x, (HIDDEN,))))
        return self.head(F.rms_norm(x, (HIDDEN,)))


@dataclass(eq=False)
class Request:
    """One prompt and its generated tokens."""

    tokens: list[int]  # prompt, then generated tokens
    max_new_tokens: int
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # physical blocks, in order
    num_computed: int = 0  # tokens whose keys and values are in the cache

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet; 1 for a decode."""
        return len(self.tokens) - self.num_computed

    def sample(self, logits: Tensor) -> None:
        """Append the next token. The result depends on seed and position, not on the batch."""
        token = int(logits.argmax())
        if self.temperature > 0:
            generator = torch.Generator().manual_seed(self.seed + len(self.tokens))
            weights = (logits / self.temperature).softmax(-1).cpu()
            token = int(torch.multinomial(weights, 1, generator=generator))
        self.tokens.append(token)
        self.generated.append(token)


class Engine:
    """Continuous batching with chunked prefill, prefix reuse and preemption."""

    def __init__(
        self,
        model: TinyDecoder,
        num_blocks: int = 16,
        block_size: int = 4,
        token_budget: int = 16,
        max_num_reqs: int = 4,
        device: str = "cpu",
    ) -> None:
        spec = attnlib.AttentionSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            block_size=block_size,
        )
        self.model, self.device = model, device
        self.token_budget, self.max_num_reqs = token_budget, max_num_reqs
        self.layers = [attnlib.Attention(spec, device=device) for _ in range(LAYERS)]
        self.caches = [
            attnlib.PagedKVCache.allocate(spec, num_blocks, device) for _ in range(LAYERS)
        ]
        limits = attnlib.BatchLimits(
            max_num_reqs=max_num_reqs,
            max_num_tokens=token_budget,
            max_seq_len=num_blocks * block_size,
        )
        # Weights of the norms of queries and keys; the model multiplies by 1 + weight.
        self.norms = [
            [HeadNorm(w, weight_offset=1, multiply_in_float32=True) for w in weights.detach()]
            for weights in model.norms
        ]
        self.builder = self.layers[0].backend.make_builder(spec, device, limits=limits)
        attnlib.warmup(self.layers[0], self.caches[0], limits, builder=self.builder)
        self.allocator = attnlib.BlockAllocator(num_blocks, block_size)
        self.table = attnlib.BlockTable(max_num_reqs, num_blocks, device)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_steps = self.num_reused_tokens = self.num_preemptions = 0

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of the next step with their numbers of new tokens, decodes first."""
        batch: list[tuple[Request, int]] = []
        budget = self.token_budget
        for request in list(self.running):  # oldest first
            count = min(request.num_pending, budget)
            if request in self.running and count and self.reserve(request, count):
                batch.append((request, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            hit = self.allocator.acquire_prefix(request.tokens)
            request.blocks, request.num_computed = list(hit.block_ids), hit.num_tokens
            count = min(request.num_pending, budget)
            if self.num_missing_blocks(request, count) > self.allocator.num_free_blocks:
                self.release(request)
                break
            request.blocks += self.allocator.allocate(self.num_missing_blocks(request, count))
            self.running.append(self.waiting.popleft())
            self.num_reused_tokens += hit.num_tokens
            batch.append((request, count))
            budget -= count
        return sorted(batch, key=lambda item: item[1] > 1)

    def reserve(self, request: Request, count: int) -> bool:
        """Allocate blocks for `count` more tokens; preempt the newest requests if none are free."""
        while self.num_missing_blocks(request, count) > self.allocator.num_free_blocks:
            newest = self.running.pop()
            self.release(newest)
            self.waiting.appendleft(newest)
            self.num_preemptions += 1
            if newest is request:
                return False
        request.blocks += self.allocator.allocate(self.num_missing_blocks(request, count))
        return True

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
        for row, (request, count) in enumerate(batch):
            self.table.add_row(request.blocks, row)
            span = range(request.num_computed, request.num_computed + count)
            tokens += request.tokens[span.start : span.stop]
            positions += span
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens=[count for _, count in batch],
            seq_lens=[request.num_computed + count for request, count in batch],
            block_table=self.table.commit(len(batch)),
            block_size=self.allocator.block_size,
            device=self.device,
        )
        metadata = self.builder.build(0, common)  # once per batch

        def attend(
            number: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
        ) -> Tensor:
            layer, cache = self.layers[number], self.caches[number]
            q_norm, k_norm = self.norms[number]
            q = layer.rotate_and_write_kv(
                q, k, v, cache, metadata, cos, sin, q_norm=q_norm, k_norm=k_norm
            )
            return layer(q, None, None, cache, metadata)

        with torch.no_grad():
            logits = self.model(
                torch.tensor(tokens, device=self.device),
                torch.tensor(positions, device=self.device),
                attend,
            )
        last = logits[common.query_start_loc[1:].long() - 1]  # last new token of each request
        for (request, count), row in zip(batch, last, strict=True):
            request.num_computed += count
            self.allocator.commit(request.tokens[: request.num_computed], request.blocks)
            if request.num_pending == 0:  # otherwise more chunks of the prompt follow
                request.sample(row)
                if len(request.generated) == request.max_new_tokens:
                    self.running.remove(request)
                    self.release(request)
        self.num_steps += 1

    def serve(self, requests: list[Request]) -> None:
        """Run until all requests are complete."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()


def dense_reference(model: TinyDecoder, request: Request) -> list[int]:
    """Generate alone, over the full sequence, with torch's dense attention and no cache."""

    def rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = F.rms_norm(x, (HEAD_SIZE,), 1 + weight, 1e-6).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, HEAD_SIZE)).transpose(0, 1)[None] for x in (q, k, v))
        q, k = (rotate(x, w, cos, sin) for x, w in zip((q, k), model.norms[layer], strict=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    with torch.no_grad():
        for _ in range(request.max_new_tokens):
            positions = torch.arange(len(request.tokens))
            request.sample(model(torch.tensor(request.tokens), positions, attend)[-1])
    return request.generated


def make_requests(count: int) -> list[Request]:
    """Prompts of different lengths with a common prefix; every second request is sampled."""
    prefix = list(range(1, 11))
    return [
        Request(
            tokens=prefix + [(7 * index + i) % VOCABULARY for i in range(3 + 4 * (index % 3))],
            max_new_tokens=8 + index,
            temperature=0.8 * (index % 2),
            seed=1000 * index,
        )
        for index in range(count)
    ]


def main() -> None:
    torch.manual_seed(0)
    model = TinyDecoder().eval()
    engine, requests = Engine(model), make_requests(6)
    engine.serve(requests)
    expected = [dense_reference(model, request) for request in make_requests(6)]
    equal = [request.generated for request in requests] == expected
    print(f"{len(requests)} requests, {sum(map(len, expected))} tokens, {engine.num_steps} steps")
    print(f"{engine.num_reused_tokens} tokens reused, {engine.num_preemptions} preemptions")
    print("equal to the dense reference:", equal)


if __name__ == "__main__":
    main()
