"""The tutorial's engine for a model with state layers, over one pool of keys and states.

    python -m examples.tutorial_states

Two of the four layers have lightning attention: in place of keys, a state per head that decays with
every token. The weights are random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attnlib
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup, StateGroup, with_equal_blocks
from attnlib.cache.hybrid_allocator import HybridBlockAllocator, SequenceBlocks
from attnlib.metadata.groups import group_batches
from attnlib.ops import HeadNorm
from examples.gemma3 import Decoder, random_decoder
from examples.tutorial_engine import (
    Engine,
    Request,
    dense_attention,
    dense_reference,
    make_requests,
)

KINDS = ("states", "sliding_attention", "states", "full_attention")


class StateEngine(Engine):
    """An engine whose blocks hold tokens of a group of layers, or the state of one layer.

    A prefix is reused up to where keys and states are cached. Each request keeps its states at the
    last boundary of its prompt, and where it departs from an earlier request.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int = 24,
        block_size: int = 4,
        token_budget: int = 64,
        max_num_reqs: int = 4,
    ) -> None:
        self.model, self.device = model, "cpu"
        self.token_budget, self.max_num_reqs = token_budget, max_num_reqs
        config = model.config
        heads, size = config["num_attention_heads"], config["head_dim"]
        keys = attnlib.AttentionSpec(
            num_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_size=size,
            dtype=torch.float32,
            block_size=block_size,
        )
        states = attnlib.StateSpec(
            num_heads=heads,
            num_key_heads=heads,
            key_size=size,
            value_size=size,
            update="add",
            decay="constant",
            has_beta=False,
            dtype=torch.float32,
        )
        of_states = attnlib.StateLayer(states, log_decay=log_decay(model), device="cpu")
        windowed = keys.replace(sliding_window=config["sliding_window"])
        groups = with_equal_blocks(
            {
                "full_attention": KVCacheGroup(keys, KINDS.count("full_attention")),
                "sliding_attention": KVCacheGroup(windowed, KINDS.count("sliding_attention")),
                "states": StateGroup(of_states.spec, KINDS.count("states")),
            }
        )
        self.pool = HybridKVCache(groups, num_blocks, "cpu")
        self.allocator = HybridBlockAllocator(groups, num_blocks)
        kinds: dict[str, Any] = {
            kind: of_states
            if kind == "states"
            else attnlib.Attention(group.layer_spec, device="cpu")
            for kind, group in groups.items()
        }
        self.layers = [kinds[kind] for kind in KINDS]
        self.norms = [
            [HeadNorm(norm.weight.detach(), multiply_in_float32=True) for norm in norms]
            for norms in ((layer.q_norm, layer.k_norm) for layer in model.layers)
        ]
        self.places = [KINDS[:number].count(kind) for number, kind in enumerate(KINDS)]
        self.caches = [
            self.pool.states[kind] if kind == "states" else self.pool.caches[kind][place]
            for kind, place in zip(KINDS, self.places, strict=True)
        ]
        self.builders = {
            kind: layer.backend.make_builder(layer.spec, "cpu") for kind, layer in kinds.items()
        }
        self.held: dict[Request, SequenceBlocks] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_steps = self.num_reused_tokens = self.num_preemptions = 0

    def checkpoints(self, request: Request) -> set[int]:
        size = self.allocator.common_block_size
        return {self.held[request].num_cached_keys, (len(request.prompt) - 1) // size * size}

    def chunk(self, request: Request, budget: int) -> int:
        """New tokens of a step, which ends at the next checkpoint at the latest."""
        count = super().chunk(request, budget)
        ends = (end - request.num_computed for end in self.checkpoints(request))
        return min((end for end in ends if 0 < end < count), default=count)

    def start(self, request: Request) -> None:
        self.held[request] = self.allocator.start(request.tokens)
        request.num_computed = self.held[request].num_computed

    def num_missing_blocks(self, request: Request, count: int) -> int:
        end = request.num_computed + count
        return self.allocator.num_missing_blocks(self.held[request], end)

    def grow(self, request: Request, count: int) -> None:
        self.allocator.grow(self.held[request], request.num_computed + count)

    def advance(self, request: Request, count: int) -> None:
        request.num_computed += count
        self.allocator.advance(self.held[request], request.tokens[: request.num_computed])
        if request.num_computed in self.checkpoints(request):
            self.allocator.keep(self.held[request])

    def release(self, request: Request) -> None:
        self.allocator.release(self.held.pop(request))
        request.num_computed = 0

    def metadata(self, batch: list[tuple[Request, int]], query_lens: list[int]) -> dict[str, Any]:
        """The metadata of each kind of layer; of states, that of each layer."""
        held = [self.held[request] for request, _ in batch]
        batches: dict[str, Any] = group_batches(self.allocator, held, query_lens, self.device)
        of_states = batches.pop("states").build(self.builders["states"])
        of_keys = {kind: self.builders[kind].build(0, each) for kind, each in batches.items()}
        return {**of_keys, "states": of_states}

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
        if KINDS[number] != "states":
            return super().attend(metadata, number, q, k, v, cos, sin)
        step = metadata["states"][self.places[number]]
        heads = state_inputs(self.model, number, q, k, v)
        out: Tensor = self.layers[number](*heads, None, None, self.caches[number], step)
        return out.flatten(1)


def log_decay(model: Decoder) -> Tensor:
    """Of the states of each query head."""
    return -(2.0 ** -torch.arange(1, model.config["num_attention_heads"] + 1))


def state_inputs(model: Decoder, number: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Queries, keys and values of a state layer, `[T, query heads, size]`."""
    layer, config = model.layers[number], model.config
    q, k, v = (x.unflatten(-1, (-1, config["head_dim"])) for x in (q, k, v))
    per_key = config["num_attention_heads"] // config["num_key_value_heads"]
    return [layer.q_norm(q), *(x.repeat_interleave(per_key, 1) for x in (layer.k_norm(k), v))]


def dense_hybrid(model: Decoder, positions: Tensor) -> Callable[..., Tensor]:
    """The attention of a model without cache and states: all pairs of tokens."""
    dense = dense_attention(model, positions)
    distance = (positions[:, None] - positions).double()
    decays = (log_decay(model)[:, None, None] * distance).exp().tril()

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if KINDS[number] != "states":
            return dense(number, q, k, v, cos, sin)
        q, k, v = (x.double() for x in state_inputs(model, number, q, k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * decays / model.config["head_dim"] ** 0.5
        return torch.einsum("hts,shd->thd", scores, v).flatten(1).to(model.norm.weight.dtype)

    return attend


def main() -> None:
    model = random_decoder(KINDS)
    engine, requests = StateEngine(model), make_requests(lambda text: list(text.encode())[::3])
    engine.serve(requests)
    tokens = sum(len(request.generated) for request in requests)
    print(f"{len(requests)} requests, {tokens} tokens, {engine.num_steps} steps")
    print(f"{engine.num_reused_tokens} tokens reused, preemptions: {engine.num_preemptions}")
    equal = all(one.generated == dense_reference(model, one, dense_hybrid) for one in requests)
    print("equal to the dense reference:", equal)


if __name__ == "__main__":
    main()
