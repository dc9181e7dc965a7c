"""A problem that every rank makes alike: one layer, its keys, and batches with their results on
one process.

Every rank computes the reference itself, with the query heads of all ranks, and compares its own
heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import attnlib
from attnlib.parallel import (
    Interleaved,
    ParallelAttention,
    ParallelMetadata,
    RankGroup,
    divided_batch,
)
from attnlib.parallel.divisions import Division

BLOCK = 4
STEPS: dict[str, list[tuple[int, int]]] = {
    "short": [(1, 1), (1, 1), (0, 0), (1, 1)],
    "prefill": [(13, 13), (1, 1), (22, 22), (0, 0)],
    "mixed": [(1, 14), (9, 10), (1, 23), (17, 17)],
    "decode": [(1, 15), (1, 11), (1, 24), (1, 18)],
    "verification": [(4, 19), (3, 14), (4, 28), (1, 19)],
    "decode again": [(1, 20), (1, 15), (0, 28), (1, 20)],
}
"""Steps of four requests: new tokens and length of each. In the first one most ranks are empty."""


@dataclass
class Problem:
    """A layer and how it is divided.

    Attributes:
        spec: changes of the spec of one rank's heads.
        run: of the interleaved division, unless `division` is given.
        steps: of `STEPS`.
        options: of `ParallelAttention`.
        scales: of the cache.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    run: int = 1
    division: Any = None
    steps: tuple[str, ...] = tuple(STEPS)
    options: dict[str, Any] = field(default_factory=dict)
    scales: float = 1.0

    def rank_spec(self) -> attnlib.AttentionSpec:
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
        return attnlib.AttentionSpec(**{**sizes, "block_size": BLOCK, **self.spec})

    def cache(self, num_blocks: int, device: str) -> attnlib.PagedKVCache:
        """An empty cache, of NaN where its elements are not quantized."""
        spec, scales = self.rank_spec(), {"k_scale": self.scales, "v_scale": self.scales}
        if spec.kv_format.scales_in_page:
            scales = {}
        cache = attnlib.PagedKVCache.allocate(spec, num_blocks, device, **scales)
        if spec.kv_dtype == torch.float32:
            cache.key_cache.fill_(torch.nan)
            cache.value_cache.fill_(torch.nan)
        return cache


class Run:
    """A problem on one rank.

    Args:
        problem: the problem.
        group: the ranks.
        device: of this rank.
    """

    def __init__(self, problem: Problem, group: RankGroup, device: str = "cpu") -> None:
        self.problem, self.group, self.spec = problem, group, problem.rank_spec()
        self.device = device
        spec, world = self.spec, group.world_size
        self.division: Division = (
            Interleaved(world, problem.run) if problem.division is None else problem.division(world)
        )
        self.random = torch.Generator().manual_seed(7)
        self.captured: ParallelMetadata | None = None
        heads = world * spec.num_heads
        per_head = {}
        if spec.has_sink:
            per_head["sinks"] = self.draw(heads)
        if spec.has_alibi:
            per_head["alibi_slopes"] = self.draw(heads).abs() / 8
        scale = spec.head_size**-0.5
        self.whole = attnlib.Attention(
            spec.replace(num_heads=heads, needs_lse=True),
            scale=scale,
            device=self.device,
            **per_head,
        )
        own = {name: self.own(values[None])[0] for name, values in per_head.items()}
        self.layer = ParallelAttention(
            spec, group, self.division, scale=scale, device=self.device, **own, **problem.options
        )
        blocks = 4 * 9
        self.caches = [problem.cache(blocks, self.device) for _ in range(2)]
        order = torch.Generator().manual_seed(group.rank)
        self.tables = [
            torch.randperm(blocks, generator=random).view(4, 9).int().to(self.device)
            for random in (self.random, order)
        ]
        self.builders = (
            self.whole.backend.make_builder(self.whole.spec, self.device), self.layer.make_builder()
        )  # fmt: skip

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def own(self, per_head: torch.Tensor) -> torch.Tensor:
        """The heads of this rank, `[T, Hq, ...]`, of those of all ranks."""
        sizes = (self.spec.num_kv_heads, self.group.world_size, self.spec.group_size)
        return per_head.unflatten(1, sizes)[:, :, self.group.rank].flatten(1, 2).contiguous()

    def tensors(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        heads = spec.num_heads * self.group.world_size
        query = self.draw(tokens, heads, spec.head_size).to(spec.dtype)
        key = self.draw(tokens, spec.num_kv_heads, spec.head_size).to(spec.dtype)
        value = self.draw(tokens, spec.num_kv_heads, spec.head_size_v).to(spec.dtype)
        return query, key, key[..., : spec.head_size_v] if spec.use_mla else value

    def step(
        self, lengths: list[tuple[int, int]], *, captures: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """One batch: output and LSE of this rank, and of the reference.

        With `captures`, this batch and those after it run over the metadata of this one, as a CUDA
        graph of it would.
        """
        query_lens, seq_lens = ([pair[n] for pair in lengths] for n in (0, 1))
        query, key, value = self.tensors(sum(query_lens))
        arguments = (self.tables[0], BLOCK, self.device)
        common = attnlib.CommonAttentionMetadata.from_lengths(query_lens, seq_lens, *arguments)
        metadata = self.builders[0].build(0, common)
        whole = self.whole(query, key, value, self.caches[0], metadata, True)
        batch = divided_batch(query_lens, seq_lens, self.tables[1], self.device)
        if captures:
            built = self.captured = self.builders[1].build_for_cudagraph_capture(batch)
        else:
            built = self.builders[1].build(batch)
            built = built if self.captured is None else self.captured
        found = self.layer(self.own(query), key, value, self.caches[1], built, True)
        return (*found, *(self.own(part) for part in whole))

    def largest_error(self) -> float:
        """Of all steps."""
        worst = 0.0
        for name in self.problem.steps:
            worst = max(worst, error_of(*self.step(STEPS[name])))
        return worst


def error_of(
    out: torch.Tensor, lse: torch.Tensor, wanted: torch.Tensor, wanted_lse: torch.Tensor
) -> float:
    """The largest difference; inf for a result that is not finite, or LSEs of -inf elsewhere."""
    empty = wanted_lse == -torch.inf
    if not torch.equal(empty, lse == -torch.inf) or not bool(out.isfinite().all()):
        return float("inf")
    errors = (out - wanted).abs().flatten(), (lse - wanted_lse)[~empty].abs().nan_to_num(torch.inf)
    return max(float(each.max()) if each.numel() else 0.0 for each in errors)
