"""Cases of divided prefills, by name; see `tests.parallel.cases`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

import attnlib
from attnlib.kv_formats import register_kv_format, unregister_kv_format
from attnlib.mla import LatentAttention
from attnlib.parallel import (
    Division,
    Interleaved,
    ParallelAttention,
    ParallelPrefill,
    RankGroup,
    ZigZag,
    divided_batch,
    warmup_parallel,
)
from attnlib.parallel.prompts import Segment
from tests.kv_formats.device_formats import SQUARES
from tests.parallel.cases import LATENT, LIMIT, DecodesOnly, not_refused, runs_of
from tests.parallel.problem import BLOCK, STEPS, Problem, error_of
from tests.testing.toy_backend import ToyBackend

RING, GATHER = {"method": "ring"}, {"method": "all_gather"}
FULL = {"has_sink": True, "logits_soft_cap": 3.0}
PAGES = {"kv_cache_dtype": "int8_per_token_head", "value_cache_dtype": "int4_per_group"}
CHUNKS = ("prefill", "mixed", "decode", "verification", "more")
"""Steps in which prompts are without context, with context, and decodes among them."""
LENGTHS = {**STEPS, "more": [(0, 19), (14, 28), (7, 35), (11, 30)]}


def zigzag(world_size: int) -> ZigZag:
    return ZigZag(world_size, 3)


PROBLEMS = {
    "ring": Problem(options=RING),
    "ring: sinks, soft cap": Problem(FULL, run=3, options=RING),
    "ring: contiguous": Problem(division=runs_of(9), options=RING),
    "ring: zigzag": Problem(division=zigzag, options=RING),
    "ring: latents": Problem(LATENT, options=RING),
    "ring: fp8": Problem({"kv_cache_dtype": "fp8"}, scales=0.5, options=RING),
    "ring: two formats": Problem(PAGES, options=RING),
    "gather: zigzag": Problem(division=zigzag, options=GATHER),
    "gather: window, sinks, soft cap": Problem({**FULL, "sliding_window": 6}, options=GATHER),
    "gather: window, contiguous": Problem({"sliding_window": 11}, division=runs_of(9)),
    "gather: chunks": Problem({"attention_chunk_size": 8}),
    "gather: chunks, window": Problem({"attention_chunk_size": 12, "sliding_window": 7}, run=3),
    "gather: alibi": Problem({"has_alibi": True}, run=BLOCK),
    "gather: latents in fp8": Problem(
        {**LATENT, "kv_cache_dtype": "fp8", "sliding_window": 5}, scales=0.25
    ),
    "gather: two formats": Problem(PAGES, options=GATHER),
    "a backend of decoders": Problem({"has_sink": True}, options={"backend": ToyBackend}),
}


def per_head(spec: attnlib.AttentionSpec, random: torch.Generator) -> dict[str, torch.Tensor]:
    found = {}
    if spec.has_sink:
        found["sinks"] = torch.randn(spec.num_heads, generator=random)
    if spec.has_alibi:
        found["alibi_slopes"] = torch.rand(spec.num_heads, generator=random) / 8
    return found


class Run:
    """A problem on one rank: divided prefills, and the reference over a whole cache.

    Args:
        problem: the problem; a rank computes all heads of its spec.
        group: the ranks.
        device: of this rank.
    """

    def __init__(self, problem: Problem, group: RankGroup, device: str = "cpu") -> None:
        self.group, self.spec, self.device = group, problem.rank_spec(), device
        spec, self.random = self.spec, torch.Generator().manual_seed(11)
        self.division: Division = (
            Interleaved(group.world_size, problem.run)
            if problem.division is None
            else problem.division(group.world_size)
        )
        given = {name: x.to(device) for name, x in per_head(spec, self.random).items()}
        self.layer = ParallelPrefill(
            spec, group, self.division, device=device, **given, **problem.options
        )
        self.call: Callable[..., Any] = self.layer
        self.builder = self.layer.make_builder()
        self.whole = attnlib.Attention(spec.replace(needs_lse=True), device=device, **given)
        self.caches = [problem.cache(4 * 9, device) for _ in range(2)]
        order = torch.Generator().manual_seed(group.rank)
        self.tables = [
            torch.randperm(36, generator=random).view(4, 9).int().to(device)
            for random in (self.random, order)
        ]

    def tensors(self, tokens: int) -> list[torch.Tensor]:
        spec = self.spec
        sizes = (spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size)
        query, key, value = (
            torch.randn(tokens, *each, generator=self.random).to(self.device, spec.dtype)
            for each in (*sizes, (spec.num_kv_heads, spec.head_size_v))
        )
        return [query, key, key[..., : spec.head_size_v] if spec.use_mla else value]

    def step(self, lengths: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Output and LSE of the tokens of this rank, and of the reference."""
        query_lens, seq_lens = ([pair[n] for pair in lengths] for n in (0, 1))
        inputs = self.tensors(sum(query_lens))
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, self.tables[0], BLOCK, self.device
        )
        built = self.whole.backend.make_builder(self.whole.spec, self.device).build(0, common)
        whole = self.whole(*inputs, self.caches[0], built, True)
        contexts = [total - new for new, total in lengths]
        batch = self.builder.build(query_lens, self.tables[1], contexts)
        own = batch.token_rows
        found = self.call(*(each[own] for each in inputs), self.caches[1], batch, True)
        return (*found, *(each[own] for each in whole))

    def wrong_keys(self, lengths: list[tuple[int, int]]) -> str:
        """Which position of a rank is not stored as in the whole cache; "" for none."""
        for request, (_, length) in enumerate(lengths):
            for position in range(length):
                local = self.division.local(position)
                held, stored = (
                    [
                        view.view(torch.uint8)[table[request, index // BLOCK], index % BLOCK]
                        for view in cache.block_views
                    ]
                    for cache, table, index in zip(
                        self.caches, self.tables, (position, local), strict=True
                    )
                )
                own = self.division.owner(position) == self.group.rank
                if own and not all(map(torch.equal, held, stored)):
                    return f"error: position {position} of request {request} is not stored"
        return ""


def compare(problem: Problem, group: RankGroup) -> str:
    """Outputs, LSEs and the stored share of a rank against one process."""
    run = Run(problem, group)
    errors = [error_of(*run.step(LENGTHS[name])) for name in CHUNKS]
    return _text(errors, run, LENGTHS["more"])


def _text(errors: list[float], run: Run, lengths: list[tuple[int, int]]) -> str:
    if all(error <= LIMIT for error in errors):
        return run.wrong_keys(lengths)
    return f"error of each step: {errors}"


def decodes_between(group: RankGroup) -> str:
    """X10: `ParallelAttention` decodes over the cache that prefills fill, and the other way."""
    world = group.world_size
    run = Run(Problem({**FULL, "num_heads": 4 * world}), group)
    spec = run.spec
    heads = torch.arange(spec.num_heads).view(spec.num_kv_heads, world, -1)[:, group.rank].flatten()
    layer = ParallelAttention(
        spec.replace(num_heads=spec.num_heads // world), group, run.division, device="cpu",
        sinks=run.whole.impl.per_head_tensors[1][heads],
    )  # fmt: skip
    builder = layer.make_builder()
    lengths, errors = [0] * 4, []
    for number in range(4):
        new = [1 + 2 * number, 5, 0, 9] if number % 2 == 0 else [1, 1, 0, 1]
        lengths = [a + b for a, b in zip(lengths, new, strict=True)]
        pairs = list(zip(new, lengths, strict=True))
        if number % 2 == 0:
            errors.append(error_of(*run.step(pairs)))
        else:
            query, key, value = run.tensors(sum(new))
            common = attnlib.CommonAttentionMetadata.from_lengths(
                new, lengths, run.tables[0], BLOCK, "cpu"
            )
            built = run.whole.backend.make_builder(run.whole.spec, "cpu").build(0, common)
            whole = run.whole(query, key, value, run.caches[0], built, True)
            batch = builder.build(divided_batch(new, lengths, run.tables[1], "cpu"))
            found = layer(query[:, heads], key, value, run.caches[1], batch, True)
            errors.append(error_of(*found, *(each[:, heads] for each in whole)))
    return _text(errors, run, pairs)


def latent_projections(group: RankGroup) -> str:
    """M12: divided prefills of absorbed queries against keys and values of every head."""
    run = Run(Problem(LATENT, options=RING), group)
    spec, key_size, value_size = run.spec, 12, 10
    sizes = spec.num_heads, key_size + value_size, spec.head_size_v
    projection = torch.randn(*sizes, generator=run.random) / 4
    whole = LatentAttention(spec, projection, key_size, expand_from=1, device="cpu")
    run.layer = ParallelPrefill(
        spec, group, run.division, device="cpu", scale=whole.layer.impl.scale, **RING
    )
    errors = []
    for name in ("prefill", "mixed"):
        query_lens, seq_lens = ([pair[n] for pair in LENGTHS[name]] for n in (0, 1))
        tokens, rotary = sum(query_lens), spec.head_size - spec.head_size_v
        query = torch.randn(tokens, spec.num_heads, key_size + rotary, generator=run.random)
        latent = torch.randn(tokens, spec.head_size, generator=run.random)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, run.tables[0], BLOCK, "cpu"
        )
        built = whole.layer.backend.make_builder(spec, "cpu").build(0, common)
        wanted = whole(query, latent, run.caches[0], built)
        contexts = [total - new for new, total in LENGTHS[name]]
        batch = run.layer.make_builder().build(query_lens, run.tables[1], contexts)
        own = batch.token_rows
        keys = latent[own, None], latent[own, None, : spec.head_size_v]
        found = run.layer(whole.absorb(query[own]), *keys, run.caches[1], batch)
        errors.append(float((whole.project(found) - wanted[own]).abs().max()))
    return _text([error / 5 for error in errors], run, LENGTHS["mixed"])  # sums of other terms


def equal_bits(group: RankGroup) -> str:
    """X9: a prompt has the bits of one process, whole and in parts."""
    for spec in ({}, {"sliding_window": 6, "has_sink": True}):
        for cuts in ([22], [9, 12, 22]):
            run = Run(Problem({**spec, "batch_invariant": True}), group)
            for first, end in zip([0, *cuts], cuts, strict=False):
                other = end % 2 * 3
                found = run.step([(other, other), (0, 0), (end - first, end), (0, 0)])
                if not all(map(torch.equal, found[:2], found[2:])):
                    return f"{spec}: other bits in {first} to {end}"
    return ""


def empty_ranks(group: RankGroup) -> str:
    """Ranks without tokens, batches without tokens, and without prompts."""
    for options in (RING, GATHER):
        run = Run(Problem(FULL, options=options), group)
        lengths = [(1, 1), (0, 0), (2, 2), (0, 0)]
        errors = [error_of(*run.step(lengths))]
        lengths = [(0, 1), (0, 0), (0, 2), (1, 1)]
        errors.append(error_of(*run.step(lengths)))
        lengths = [(0, total) for _, total in lengths]
        errors.append(error_of(*run.step(lengths)))
        batch = run.builder.build([], [])
        found = run.layer(*run.tensors(0), run.caches[1], batch)
        if found.shape[0] or (text := _text(errors, run, lengths)):
            return text or f"error: {found.shape}"
    return ""


def warmed_up(group: RankGroup) -> str:
    """Only one rank warms up: nothing is exchanged, and its cache does not change."""
    for options in (RING, GATHER):
        run = Run(Problem(FULL, options=options), group)
        errors = [error_of(*run.step(LENGTHS["prefill"]))]
        if group.rank == 0:
            limits = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=32, max_seq_len=36)
            before = [view.clone() for view in run.caches[1].block_views]
            warmup_parallel(run.layer, run.caches[1], limits)
            for view, kept in zip(run.caches[1].block_views, before, strict=True):
                if not torch.equal(view.nan_to_num(7.0), kept.nan_to_num(7.0)):
                    return "error: the cache changed"
        errors.append(error_of(*run.step(LENGTHS["mixed"])))
        if text := _text(errors, run, LENGTHS["mixed"]):
            return text
    return ""


def refusals(group: RankGroup) -> str:
    """X8, X10."""
    last, spec = group.rank == group.world_size - 1, Problem().rank_spec()
    division, table = Interleaved(group.world_size), torch.arange(6).view(2, 3).int()
    layer = ParallelPrefill(spec, group, division, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 6, "cpu")

    with mock.patch.dict(os.environ, {"ATTNLIB_VALIDATE": "1"}):
        if ParallelPrefill(spec, group, division, device="cpu").agreement != "call":
            return "ATTNLIB_VALIDATE=1 asks for no agreement in each call"

    def other_prompts() -> None:
        layer.make_builder().build([4, 5 + last], table)

    def window_in_a_ring() -> None:
        windowed = spec.replace(sliding_window=4)
        ParallelPrefill(windowed, group, division, device="cpu", method="ring")

    def other_context() -> None:
        layer.make_builder().build([4, 5], table, [0, int(last)])

    def other_cache() -> None:
        rows = layer.make_builder().build([4, 5], table + (6 if last else 0), [0, 1])
        layer(*(torch.zeros(rows.num_actual_tokens, n, 16) for n in (4, 2, 2)), cache, rows)

    def ring_of_decoders() -> None:
        ParallelPrefill(
            spec, group, division, device="cpu", method="ring", backend=ToyBackend if last else None
        )

    def no_table() -> None:
        missing: Any = None
        layer.make_builder().build([4, 5], missing if last else table)

    def no_prefills() -> None:
        given: dict[str, Any] = {
            "device": "cpu",
            "backend": DecodesOnly if last else None,
            **GATHER,
        }
        ParallelPrefill(spec, group, division, **given).make_builder().build([12], table[:1])

    def too_many_rows() -> None:
        batch = layer.make_builder().build([4, 5], table)
        rows = batch.num_actual_tokens + last
        query, key, value = (torch.zeros(rows, n, 16) for n in (4, 2, 2))
        layer(query, key, value, cache, batch)

    def no_value() -> None:
        batch = layer.make_builder().build([4, 5], table)
        query, key, value = (torch.zeros(batch.num_actual_tokens, n, 16) for n in (4, 2, 2))
        given: Any = None if last else value
        layer(query, key, given, cache, batch)

    def other_scales() -> None:
        scaled = spec.replace(kv_cache_dtype="fp8")
        stored = attnlib.PagedKVCache.allocate(scaled, 6, "cpu", k_scale=1.0 + last)
        made = ParallelPrefill(scaled, group, division, device="cpu")
        batch = made.make_builder().build([4, 5], table)
        made(*(torch.zeros(batch.num_actual_tokens, n, 16) for n in (4, 2, 2)), stored, batch)

    def other_version() -> None:
        stored = register_kv_format(replace(SQUARES, version=1 + last))
        try:
            ParallelPrefill(spec.replace(kv_cache_dtype=stored.name), group, division, device="cpu")
        finally:
            unregister_kv_format(stored.name)

    def a_part_of_a_token() -> None:
        layer.make_builder().build([4, 2.5 if last else 2], table)

    def no_list() -> None:
        given: Any = 4 if last else [4]
        layer.make_builder().build(given, table[:1])

    def no_block() -> None:
        layer.make_builder().build([4, 5], table - int(last))

    def batch_of_a_window() -> None:
        windowed = ParallelPrefill(spec.replace(sliding_window=4), group, division, device="cpu")
        batch = windowed.make_builder().build([4], table[:1], [5])
        rows = (torch.zeros(batch.num_actual_tokens, n, 16) for n in (4, 2, 2))
        layer(*rows, cache, batch)

    expected = {
        other_prompts: "ranks 0 and", other_context: "ranks 0 and",
        other_cache: "but the cache has 6 blocks", window_in_a_ring: "use 'all_gather'",
        other_scales: "[1.0, 1.0]", other_version: "KVFormat('tests:squares', version=2)",
        no_value: "value is a NoneType; it must be a torch.Tensor",
        no_list: "prompt_lens is a int; pass a list", no_table: "block_table=None",
        a_part_of_a_token: "2.5 is a float", no_block: "negative",
        batch_of_a_window: "was built for", no_prefills: "refuses: AssertionError",
        ring_of_decoders: "encoder_decoder", too_many_rows: "this rank has",
    }  # fmt: skip
    return not_refused(expected)


def diagonal_of_local_lengths(group: RankGroup) -> str:
    def wrong(division: Any, segment: Segment, owner: int, rank: int) -> int:
        length = int(division.count(segment.end, owner))
        return min(int(division.local(segment.end - 1)) + 1, length)

    with mock.patch("attnlib.parallel.prefill_keys.visible_keys", wrong):
        return compare(PROBLEMS["ring"], group)


def context_at_local_positions(group: RankGroup) -> str:
    """A window over received context that is arranged by the indices of its rank."""

    def wrong(self: Any, local: Any, rank: int) -> Any:
        return local

    with mock.patch.object(Interleaved, "position", wrong):
        return compare(PROBLEMS["gather: window, sinks, soft cap"], group)


PROPERTIES: dict[str, Callable[[RankGroup], str]] = {
    "refusals": refusals,
    "decodes between prefills": decodes_between,
    "equal bits": equal_bits,
    "latent projections": latent_projections,
    "warmed up": warmed_up,
    "empty ranks": empty_ranks,
}
WRONG: dict[str, Callable[[RankGroup], str]] = {
    "a diagonal from local lengths": diagonal_of_local_lengths,
    "context at local positions": context_at_local_positions,
}
CASES: dict[str, Callable[[RankGroup], str]] = {
    **{name: partial(compare, problem) for name, problem in PROBLEMS.items()},
    **PROPERTIES,
    **WRONG,
}
