"""Cases of divided prefills, by name; see `tests.parallel.cases`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.parallel import Interleaved, ParallelPrefill, RankGroup
from attnlib.parallel.prompts import Segment
from tests.parallel.cases import LATENT, LIMIT
from tests.parallel.problem import BLOCK, Problem

PROMPTS = [13, 1, 22, 0, 7]
RING, GATHER = {"method": "ring"}, {"method": "all_gather"}
FULL = {"has_sink": True, "logits_soft_cap": 3.0}

PROBLEMS = {
    "ring": Problem(options=RING),
    "ring: sinks, soft cap": Problem(FULL, run=3, options=RING),
    "ring: latents": Problem(LATENT, options=RING),
    "ring: fp8": Problem({"kv_cache_dtype": "fp8"}, scales=0.5, options=RING),
    "gather: window, sinks, soft cap": Problem({**FULL, "sliding_window": 6}, options=GATHER),
    "gather: chunks": Problem({"attention_chunk_size": 8}),
    "gather: alibi": Problem({"has_alibi": True}, run=BLOCK),
    "gather: latents in fp8": Problem({**LATENT, "kv_cache_dtype": "fp8"}, scales=0.25),
}


def per_head(spec: attnlib.AttentionSpec, random: torch.Generator) -> dict[str, torch.Tensor]:
    found = {}
    if spec.has_sink:
        found["sinks"] = torch.randn(spec.num_heads, generator=random)
    if spec.has_alibi:
        found["alibi_slopes"] = torch.rand(spec.num_heads, generator=random) / 8
    return found


def compare(problem: Problem, group: RankGroup) -> str:
    """Outputs, LSEs and the stored share of a rank against one process."""
    spec, random = problem.rank_spec(), torch.Generator().manual_seed(11)
    division, given = Interleaved(group.world_size, problem.run), per_head(spec, random)
    layer = ParallelPrefill(spec, group, division, device="cpu", **given, **problem.options)
    whole = attnlib.Attention(spec.replace(needs_lse=True), device="cpu", **given)
    scales = {"k_scale": problem.scales, "v_scale": problem.scales}
    blocks, reqs = 9, len(PROMPTS)
    caches = [attnlib.PagedKVCache.allocate(spec, blocks * reqs, "cpu", **scales) for _ in range(2)]
    table = torch.randperm(blocks * reqs, generator=random).view(reqs, blocks).int()
    sizes = (spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size)
    tokens = sum(PROMPTS)
    query, key = (torch.randn(tokens, *each, generator=random) for each in sizes)
    value = torch.randn(tokens, spec.num_kv_heads, spec.head_size_v, generator=random)
    value = key[..., : spec.head_size_v] if spec.use_mla else value
    common = attnlib.CommonAttentionMetadata.from_lengths(PROMPTS, PROMPTS, table, BLOCK, "cpu")
    built = whole.backend.make_builder(whole.spec, "cpu").build(0, common)
    wanted, wanted_lse = whole(query, key, value, caches[0], built, True)
    batch = layer.make_builder().build(PROMPTS, table)
    own = batch.token_rows
    out, lse = layer(query[own], key[own], value[own], caches[1], batch, True)
    error = float(max((out - wanted[own]).abs().max(), (lse - wanted_lse[own]).abs().max()))
    if not error <= LIMIT:
        return f"error {error:g}"
    for request, length in enumerate(PROMPTS):
        for position in range(length):
            local = division.local(position)
            held, stored = (
                cache.key_cache.view(torch.uint8)[table[request, index // BLOCK], index % BLOCK]
                for cache, index in zip(caches, (position, local), strict=True)
            )
            if division.owner(position) == group.rank and not torch.equal(held, stored):
                return f"error: the key of position {position} of prompt {request} is not stored"
    return ""


def refusals(group: RankGroup) -> str:
    """X8, X10."""
    last, spec = group.rank == group.world_size - 1, Problem().rank_spec()
    division, table = Interleaved(group.world_size), torch.arange(6).view(2, 3).int()
    layer = ParallelPrefill(spec, group, division, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 6, "cpu")

    def other_prompts() -> None:
        layer.make_builder().build([4, 5 + last], table)

    def window_in_a_ring() -> None:
        windowed = spec.replace(sliding_window=4)
        ParallelPrefill(windowed, group, division, device="cpu", method="ring")

    def too_many_rows() -> None:
        batch = layer.make_builder().build([4, 5], table)
        rows = batch.num_actual_tokens + last
        query, key, value = (torch.zeros(rows, n, 16) for n in (4, 2, 2))
        layer(query, key, value, cache, batch)

    expected = {
        other_prompts: "ranks 0 and", window_in_a_ring: "use 'all_gather'",
        too_many_rows: "this rank has",
    }  # fmt: skip
    for call, text in expected.items():
        try:
            call()
        except ContractError as error:
            if text not in str(error) or "X8" not in str(error):
                return f"{call.__name__}: {error}"
        else:
            return f"{call.__name__} was not refused"
    return ""


def diagonal_of_local_lengths(group: RankGroup) -> str:
    def wrong(division: Any, segment: Segment, owner: int, rank: int) -> int:
        length = int(division.count(segment.end, owner))
        return min(int(division.local(segment.end - 1)) + 1, length)

    with mock.patch("attnlib.parallel.prefill_builder.visible_keys", wrong):
        return compare(PROBLEMS["ring"], group)


PROPERTIES: dict[str, Callable[[RankGroup], str]] = {"refusals": refusals}
WRONG: dict[str, Callable[[RankGroup], str]] = {
    "a diagonal from local lengths": diagonal_of_local_lengths
}
CASES: dict[str, Callable[[RankGroup], str]] = {
    **{name: partial(compare, problem) for name, problem in PROBLEMS.items()},
    **PROPERTIES,
    **WRONG,
}
