"""An engine loop over divided keys: layers with windows and sinks, and over latents.

    torchrun --nproc-per-node 3 -m examples.divided_layers

Every rank has all tokens, a part of the query heads of each KV head, and a part of the keys. The
tokens are those of one process. The number of processes divides the query heads of a KV head: 12,
and of latents 24.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnlib
from attnlib.parallel import Interleaved, ParallelAttention, RankGroup, divided_batch

HIDDEN, HEADS, BLOCK, NUM_BLOCKS = 48, 24, 4, 32
SIZES = {"num_heads": HEADS, "block_size": BLOCK, "dtype": torch.float32}
DENSE = attnlib.AttentionSpec(num_kv_heads=2, head_size=8, has_sink=True, **SIZES)
LATENT = attnlib.AttentionSpec(num_kv_heads=1, head_size=24, head_size_v=16, use_mla=True, **SIZES)
SPECS = {"window": DENSE.replace(sliding_window=6), "full": DENSE, "latent": LATENT}
PROMPTS, NEW_TOKENS = (17, 5, 30), 8


class Layer:
    """One layer with random weights, equal on all ranks."""

    def __init__(self, kind: str, spec: attnlib.AttentionSpec) -> None:
        self.kind, self.spec = kind, spec
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
        self.query, self.key, self.value = (
            torch.randn(HIDDEN, n, d) / HIDDEN**0.5
            for n, d in ((heads, size), (kv_heads, size), (kv_heads, spec.head_size_v))
        )
        self.out = torch.randn(heads, spec.head_size_v, HIDDEN) / (heads * size) ** 0.5
        self.sinks = torch.randn(heads) if spec.has_sink else None

    def heads_of(self, rank: int, world_size: int) -> Tensor:
        """The query heads of a rank: as many of each KV head, in their order.

        Raises:
            ValueError: the query heads of a KV head cannot be divided among so many ranks.
        """
        per_kv = self.spec.group_size
        if per_kv % world_size:
            raise ValueError(
                f"{world_size} processes must divide the {per_kv} query heads of a KV head: choose "
                "another --nproc-per-node"
            )
        heads = torch.arange(self.spec.num_heads).view(self.spec.num_kv_heads, world_size, -1)
        return heads[:, rank].flatten()


class Engine:
    """All requests at once: prompts in chunks of up to 12 tokens, then one token of each.

    Args:
        layers: of the model.
        embedding: `[tokens, HIDDEN]`.
        group: the ranks that share keys; None is one process.
    """

    def __init__(self, layers: list[Layer], embedding: Tensor, group: RankGroup | None) -> None:
        self.layers, self.embedding, self.group = layers, embedding, group
        self.world_size, rank = (group.world_size, group.rank) if group else (1, 0)
        self.heads = [layer.heads_of(rank, self.world_size) for layer in layers]
        self.attention: list[Any] = []
        for layer, heads in zip(layers, self.heads, strict=True):
            sinks = None if layer.sinks is None else layer.sinks[heads]
            spec = layer.spec.replace(num_heads=len(heads))
            scale = 8**-0.5  # of latents that of the heads before absorption
            if group is None:
                made = attnlib.Attention(spec, scale=scale, sinks=sinks, device="cpu")
            else:
                division = Interleaved(self.world_size)
                made = ParallelAttention(
                    spec, group, division, scale=scale, sinks=sinks, device="cpu"
                )
            self.attention.append(made)
        self.builders = {}  # one for each kind of layer
        for layer, made in zip(layers, self.attention, strict=True):
            if group is None:
                builder: Any = made.backend.make_builder(layer.spec, "cpu")
            else:
                builder = made.make_builder()
            self.builders.setdefault(layer.kind, builder)
        self.caches = [
            attnlib.PagedKVCache.allocate(layer.spec, NUM_BLOCKS, "cpu") for layer in layers
        ]
        # A block holds BLOCK tokens on each rank, and thus so many positions of a request.
        self.allocator = attnlib.BlockAllocator(NUM_BLOCKS, BLOCK * self.world_size)

    def step(self, tokens: list[list[int]], done: list[int], blocks: list[list[int]]) -> Tensor:
        """The hidden state of the last token of each request."""
        new = [len(each) for each in tokens]
        lengths = [a + b for a, b in zip(done, new, strict=True)]
        for owned, length in zip(blocks, lengths, strict=True):
            needed = -(-length // (BLOCK * self.world_size)) - len(owned)
            owned += self.allocator.allocate(needed)
        if self.group is None:
            common = attnlib.CommonAttentionMetadata.from_lengths(
                new, lengths, blocks, BLOCK, "cpu"
            )
            batch = {kind: builder.build(0, common) for kind, builder in self.builders.items()}
        else:
            common = divided_batch(new, lengths, blocks, "cpu")
            batch = {kind: builder.build(common) for kind, builder in self.builders.items()}
        x = self.embedding[torch.tensor([token for each in tokens for token in each])]
        for layer, heads, attend, cache in zip(
            self.layers, self.heads, self.attention, self.caches, strict=True
        ):
            query = torch.einsum("th,hnd->tnd", x, layer.query[:, heads])
            key = torch.einsum("th,hnd->tnd", x, layer.key)
            value = torch.einsum("th,hnd->tnd", x, layer.value)
            if layer.spec.use_mla:
                value = key[..., : layer.spec.head_size_v]
            found = attend(query, key, value, cache, batch[layer.kind])
            added = torch.einsum("tnd,ndh->th", found, layer.out[heads])
            if self.group is not None:
                dist.all_reduce(added)  # the heads of all ranks
            x = torch.nn.functional.layer_norm(x + added, (HIDDEN,))
        return x[torch.tensor(new).cumsum(0) - 1]

    def generate(self) -> list[list[int]]:
        """The new tokens of each request."""
        random = torch.Generator().manual_seed(1)
        vocabulary = len(self.embedding)
        prompts = [
            torch.randint(vocabulary, (length,), generator=random).tolist() for length in PROMPTS
        ]
        done, blocks = [0] * len(prompts), [[] for _ in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        while any(len(each) < NEW_TOKENS for each in found):
            tokens = [
                (prompt + new)[start : start + 12]
                for prompt, new, start in zip(prompts, found, done, strict=True)
            ]
            logits = self.step(tokens, done, blocks) @ self.embedding.T
            done = [start + len(each) for start, each in zip(done, tokens, strict=True)]
            for number, prompt in enumerate(prompts):
                if done[number] == len(prompt) + len(found[number]):
                    found[number].append(int(logits[number].argmax()))
        return found


def tokens_of(group: RankGroup) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of a group, and those of one process."""
    torch.manual_seed(0)
    layers = [Layer(kind, spec) for kind, spec in SPECS.items()]
    embedding = torch.randn(64, HIDDEN)
    with torch.no_grad():
        divided, whole = (Engine(layers, embedding, each).generate() for each in (group, None))
    return divided, whole


def main() -> None:
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it by torchrun --nproc-per-node 3 -m examples.divided_layers")
    dist.init_process_group("gloo")
    found, wanted = tokens_of(RankGroup())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {sum(map(len, found))} tokens")
        print("equal to one process:", found == wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
