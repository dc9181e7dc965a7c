"""The tutorial's engine on several ranks: weights divided by heads, keys by position.

    torchrun --nproc-per-node 2 -m examples.tutorial_ranks
    torchrun --nproc-per-node 4 -m examples.tutorial_ranks --context 2 --random

Every rank runs the same scheduler. Ranks that have query heads of the same KV heads share the keys
of these (`attnlib.parallel`): `--context` is the number of such ranks. Gemma 3 270M has one KV
head, which all ranks share; `--random` takes a small model with two.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import attnlib
from attnlib.ops.torch.rotary_write import rotate
from attnlib.parallel import Interleaved, ParallelAttention, RankGroup, divided_batch
from examples.gemma3 import Decoder, load
from examples.tutorial_engine import Engine, dense_reference, make_requests


class Ranks(NamedTuple):
    """The place of this rank.

    Attributes:
        world_size, rank: of all processes.
        keys: the ranks that share the keys of some KV heads.
        shard, num_shards: which of the groups of KV heads they have.
    """

    world_size: int
    rank: int
    keys: RankGroup
    shard: int
    num_shards: int

    @classmethod
    def of(cls, context: int) -> Ranks:
        """Consecutive ranks share keys, `context` of them."""
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if context < 1 or world_size % context:
            known = [str(each) for each in range(1, world_size + 1) if not world_size % each]
            raise ValueError(
                f"--context {context} must divide the {world_size} processes: choose "
                f"{' or '.join(known)}, or another --nproc-per-node"
            )
        num_shards = world_size // context
        groups = [
            dist.new_group(list(range(shard * context, (shard + 1) * context)))
            for shard in range(num_shards)
        ]
        shard = rank // context
        return cls(world_size, rank, RankGroup(groups[shard]), shard, num_shards)


class Summed(nn.Module):
    """A linear layer over this rank's inputs; the results of all ranks are added."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        dist.all_reduce(out)
        return out


def rank_model(model: Decoder, ranks: Ranks) -> Decoder:
    """The part of the weights that a rank has."""
    config = model.config
    size, heads, kv_heads, inner = (
        config[name]
        for name in ("head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    world_size, per_kv = ranks.world_size, heads // kv_heads
    contexts = [
        context
        for context in range(1, world_size + 1)
        if not (world_size % context or per_kv % context or kv_heads % (world_size // context))
    ]
    if inner % world_size or ranks.keys.world_size not in contexts:
        action = "choose another --nproc-per-node"
        if contexts and not inner % world_size:
            action = f"choose --context {' or '.join(map(str, contexts))}"
        raise ValueError(
            f"{kv_heads} KV heads of {per_kv} query heads and {inner} inner elements cannot be "
            f"divided among {world_size} processes, {ranks.keys.world_size} of which share keys: "
            f"{action}"
        )
    own_kv = range(kv_heads)[ranks.shard :: ranks.num_shards]
    own = per_kv // ranks.keys.world_size
    first = ranks.keys.rank * own
    query_heads = [kv * per_kv + first + head for kv in own_kv for head in range(own)]
    queries, keys = (
        torch.tensor([head * size + i for head in chosen for i in range(size)])
        for chosen in (query_heads, own_kv)
    )
    inside = torch.arange(inner).chunk(world_size)[ranks.rank]
    part = copy.deepcopy(model)
    part.config = {
        **config, "num_attention_heads": len(query_heads), "num_key_value_heads": len(own_kv)
    }  # fmt: skip
    for layer in part.layers:
        for name, rows in (
            ("q_proj", queries), ("k_proj", keys), ("v_proj", keys), ("gate_proj", inside),
            ("up_proj", inside),
        ):  # fmt: skip
            linear = getattr(layer, name)
            linear.weight = nn.Parameter(linear.weight[rows].detach())
        for name, columns in (("o_proj", queries), ("down_proj", inside)):
            linear = getattr(layer, name)
            linear.weight = nn.Parameter(linear.weight[:, columns].detach())
            setattr(layer, name, Summed(linear))
    return part


class RankEngine(Engine):
    """The engine on one rank. A block holds `block_size` tokens on every rank that shares keys.

    Args:
        model: the whole model.
        ranks: the place of this rank.
        num_blocks, block_size, arguments: of `Engine`.
    """

    def __init__(
        self, model: Decoder, ranks: Ranks, num_blocks: int = 12, block_size: int = 8,
        **arguments: Any,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        super().__init__(rank_model(model, ranks), num_blocks, block_size, **arguments)
        positions = block_size * ranks.keys.world_size
        self.allocator = attnlib.BlockAllocator(num_blocks, positions)

    def make_layers(self, specs: list[attnlib.AttentionSpec], limits: attnlib.BatchLimits) -> None:
        division = Interleaved(self.ranks.keys.world_size)
        self.layers = [
            ParallelAttention(one, self.ranks.keys, division, device=self.device) for one in specs
        ]
        kinds = {kind: self.layers[self.model.kinds.index(kind)] for kind in self.specs}
        self.builders = {kind: layer.make_builder() for kind, layer in kinds.items()}

    def build(self, query_lens: list[int], seq_lens: list[int], table: Tensor) -> dict[str, Any]:
        common = divided_batch(query_lens, seq_lens, table, self.device)
        return {kind: builder.build(common) for kind, builder in self.builders.items()}

    def attend(
        self, metadata: dict[str, Any], number: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor,
        sin: Tensor,
    ) -> Tensor:  # fmt: skip
        size = self.model.config["head_dim"]
        q, k = (
            rotate(x.unflatten(1, (-1, size)), cos, sin, norm=norm)
            for x, norm in zip((q, k), self.norms[number], strict=True)
        )
        step = metadata[self.model.kinds[number]]
        return self.layers[number](q.flatten(1), k, v, self.caches[number], step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, help="ranks that share keys; all by default")
    parser.add_argument("--random", action="store_true", help="random weights, two KV heads")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun --nproc-per-node 2 -m examples.tutorial_ranks")
    dist.init_process_group("gloo")
    model, encode, _ = load(random=arguments.random)
    ranks = Ranks.of(dist.get_world_size() if arguments.context is None else arguments.context)
    engine, requests = RankEngine(model, ranks), make_requests(encode)
    engine.serve(requests)
    equal = all(request.generated == dense_reference(model, request) for request in requests)
    if ranks.rank == 0:
        tokens = sum(len(request.generated) for request in requests)
        print(f"{ranks.world_size} ranks, {ranks.keys.world_size} of them share keys")
        print(f"{len(requests)} requests, {tokens} tokens, {engine.num_steps} steps")
        print("equal to the dense reference:", equal)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
