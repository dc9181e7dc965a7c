"""Cases of exchanges by memory, with Triton's interpreter and memory that processes share."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from attnlib.errors import ContractError, RankLostError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadata
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.split_states import SplitStates
from attnlib.ops.triton.kernels import peer_waits, peer_words
from attnlib.ops.triton.peer_words import merge_words, share_words
from attnlib.parallel import (
    RankGroup,
    between,
    divided_batch,
    exchange,
    warmup,
    warmup_parallel,
)
from attnlib.workspace import BatchLimits
from tests.parallel.cases import LATENT, LIMIT, leaving_nan
from tests.parallel.problem import BLOCK, STEPS, Problem, Run, error_of


def shared_buffers(group: RankGroup, **options: Any) -> PeerBuffers:
    """Buffers in memory that all processes map, as GPUs map each other's; options of
    `PeerBuffers.of`."""
    folder = [tempfile.mkdtemp() if group.rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    size = PeerBuffers.num_bytes()
    found = [
        torch.from_file(f"{folder[0]}/{rank}", shared=True, size=size, dtype=torch.uint8)
        for rank in range(group.world_size)
    ]
    dist.barrier()
    if group.rank == 0:
        shutil.rmtree(folder[0])
    return PeerBuffers.of(found, group.rank, **options)


def by_memory(module: str, name: str, *_: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"attnlib.ops.triton.{module}"), name)
    return found


def yielding(late: Any) -> Any:
    """A test of words that leaves the processor to the other ranks."""

    def patient(*arguments: Any) -> Any:
        found = late(*arguments)
        if found.handle.data.any():
            os.sched_yield()
        return found

    return patient


def peer_memory(group: RankGroup) -> str:
    """Decodes, verifications and prefills; the state over new tokens of a mixed batch is merged
    with what messages bring."""
    buffers, overlapping = shared_buffers(group), []
    with (
        mock.patch.object(RankGroup, "peers", lambda *_: buffers),
        mock.patch.object(exchange, "operation", by_memory),
        mock.patch.object(peer_words, "_late", yielding(peer_words._late)),
        mock.patch.object(AttentionMetadata, "behind_queries", overlapping_with(overlapping)),
    ):
        for spec in ({"has_sink": True}, LATENT):
            run = Run(Problem(spec, options={"exchange": "peer_memory"}), group)
            limits = BatchLimits(max_num_reqs=2, max_num_tokens=2, max_seq_len=2 * BLOCK)
            warmup_parallel(run.layer, run.caches[1], limits)
            for name in ("short", "prefill", "mixed", "decode", "verification"):
                with leaving_nan(run):
                    error = error_of(*run.step(STEPS[name]))
                if not error <= LIMIT:
                    return f"{spec}, {name}: error {error:g}"
    # Of two layers, two warm-ups and four steps, one of which has a state over new tokens.
    runs = [int(each.max()) for each in (buffers.share_counts, buffers.merge_counts)]
    runs.append(len(overlapping))  # no warm-up does
    return "" if runs == [12, 10, 6] else f"{runs} exchanges of queries and results, overlaps"


def decodes_by_triton(group: RankGroup) -> str:
    """Decodes that leave the combination of their splits to the exchange, where they have any."""
    from attnlib.backends.triton.impl import TritonImpl

    buffers, attend = shared_buffers(group), TritonImpl.forward_uncombined
    with (
        mock.patch.object(RankGroup, "peers", lambda *_: buffers),
        mock.patch.object(exchange, "operation", by_memory),
        mock.patch.object(peer_words, "_late", yielding(peer_words._late)),
        mock.patch.object(TritonImpl, "forward_uncombined", autospec=True) as called,
    ):
        called.side_effect = attend
        options = {"exchange": "peer_memory", "backend": "triton"}
        run = Run(Problem({"has_sink": True}, options=options), group)
        warmup._exchange(run.layer, 1, torch.device("cpu"))
        for end in range(1, 5):
            most = mock.patch.object(between, "_MOST_PROGRAMS", 0 if end == 3 else 128)
            with most:  # large batches are combined before the exchange
                error = error_of(*run.step([(1, end), (0, 0), (0, 0), (1, end)]))
            if not error <= LIMIT:
                return f"length {end}: error {error:g}"
    counts = (called.call_count, int(buffers.share_counts.max()), int(buffers.merge_counts.max()))
    return "" if counts == (3, 6, 6) else f"{counts} calls and exchanges"


def overlapping_with(found: list[Any]) -> Callable[[Any], Any]:
    """In place of `AttentionMetadata.behind_queries`: notes the batch."""

    def behind_queries(self: Any) -> Any:
        found.append(self)
        return self

    return behind_queries


def a_rank_ahead(group: RankGroup) -> str:
    """Queries are shared again, and results merged again, before a slow rank has read the first:
    an engine may give up between the two."""
    buffers, tests, rounds = shared_buffers(group), [0], range(1, 4)
    late, wrong = peer_words._late, ""

    def slow(*arguments: Any) -> Any:
        found, tests[0] = late(*arguments), tests[0] + 1
        if group.rank == 1 and tests[0] % 4 == 1:
            time.sleep(0.4)  # and then look again
            found.handle.data[...] = 1
        return found

    with mock.patch.object(peer_words, "_late", slow):
        for number in rounds:
            own = torch.full((2, 4), 10.0 * number + group.rank)
            wanted = torch.stack([own - group.rank + rank for rank in range(2)], 1)
            if not torch.equal(found := share_words(own, buffers), wanted):
                wrong += f"queries of exchange {number}: {found.tolist()} "
        for number in rounds:
            out = merged(buffers, 10.0 * number + group.rank)
            if not torch.equal(out, torch.full_like(out, 10.0 * number + 0.5)):
                wrong += f"results of exchange {number}: {out.tolist()} "
    return wrong  # not before the other rank has what it waits for


def merged(buffers: PeerBuffers, value: float) -> torch.Tensor:
    """Merge rows of a value, which all ranks of two give with the same weight; `[2, 1, 4]`."""
    partial, out, lse = torch.full((2, 2, 4), value), torch.empty(2, 1, 4), torch.empty(2, 1)
    merge_words(partial, torch.zeros(2, 2), out, lse, buffers, num_kv_heads=1, sinks=None)
    return out


def words_of_long_ago(group: RankGroup) -> str:
    """Words with any other number are old, also those of 2**30 and 3 * 2**30 exchanges ago, and
    numbers go on below 0."""
    buffers, wrong = shared_buffers(group), ""
    number = torch.tensor(2**31 - 1, dtype=torch.int32)
    for counts in (buffers.share_counts, buffers.merge_counts):
        counts.copy_(number)
    for back in (2**30, 3 * 2**30, 2**32 - 1):
        old = (number.long() + 1 - back) << 32 | 0x40404040
        for words in (buffers.shared, buffers.merged, buffers.merged_lses):
            words.copy_(old)
        dist.barrier()
        if group.rank == 1:
            time.sleep(0.2)
        own = torch.full((2, 4), 1.0 + group.rank)
        found = share_words(own, buffers)
        if not torch.equal(found, torch.tensor([1.0, 2.0])[:, None].expand(2, 2, 4)):
            wrong += f"queries, words of {back} exchanges ago: {found.tolist()} "
        if group.rank == 1:
            time.sleep(0.2)
        if not torch.equal(found := merged(buffers, 1.0 + group.rank), torch.full((2, 1, 4), 1.5)):
            wrong += f"results, words of {back} exchanges ago: {found.tolist()} "
        number = number + 1
        dist.barrier()
    return wrong


def a_rank_that_never_comes(group: RankGroup) -> str:
    """It is named, with the exchange, and nothing waits longer than the limit."""
    for counted, call in ((0, share), (1, merge)):
        buffers = shared_buffers(group, limit=timedelta(seconds=7))
        for number in range(counted):
            merged(buffers, float(number))
        buffers.waits[0] = 20  # polls
        if group.rank == 0:
            wanted = f"rank 0 of 2 waited 7 s for rank 1 in exchange {counted + 1} of "
            for _ in range(2):  # a later call waits for nothing
                try:
                    with mock.patch.object(peer_waits, "_POLLS", 10):
                        call(buffers)
                    return "an exchange without one rank"
                except RankLostError as error:
                    if wanted not in str(error):
                        return str(error)
        dist.barrier()
    return ""


def share(buffers: PeerBuffers) -> None:
    share_words(torch.ones(2, 4), buffers)


def merge(buffers: PeerBuffers) -> None:
    merged(buffers, 1.0)


def after_a_lost_exchange(group: RankGroup) -> str:
    """All ranks refuse the next batch, also of an engine that replays graphs."""
    buffers = shared_buffers(group)
    with mock.patch.object(RankGroup, "peers", lambda *_: buffers):
        run = Run(Problem(options={"exchange": "peer_memory"}), group)
    if group.rank == 0:
        buffers.record.value = 1 << 48 | 1 << 32 | 5
    try:
        run.builders[1].build(divided_batch([1], [9], run.tables[1][:1], "cpu"))
    except ContractError as error:
        wanted = "rank 0 refuses: rank 0 of 2 waited 600 s for rank 1 in exchange 5 of queries"
        return "" if wanted in str(error) else str(error)
    return "a batch after a lost exchange"


def two_streams(group: RankGroup) -> str:
    """Another kernel of this rank has begun the same exchange."""
    begun, wrong = peer_words.begun, ""
    for call, counts in ((share, "share_counts"), (merge, "merge_counts")):
        buffers = shared_buffers(group)
        own: torch.Tensor = getattr(buffers, counts)

        def beside(*arguments: Any, own: torch.Tensor = own) -> Any:
            own[:, 1].copy_(own.new_ones(()))
            return begun(*arguments)

        with mock.patch.object(peer_words, "begun", beside):
            try:
                call(buffers)
                wrong += f"{counts}: not noticed "
            except ContractError as error:
                if f"rank {group.rank} of 2: exchange 1 of" not in str(error):
                    wrong += str(error)
        dist.barrier()
    return wrong


def queries_between_words(group: RankGroup) -> str:
    """The query of one rank begins at an odd element, those of others do not."""
    buffers = shared_buffers(group)
    given = torch.arange(9).bfloat16() + group.rank
    own = (given[1:] if group.rank else given[1:].clone()).view(2, 4)
    wanted = torch.arange(1, 9).bfloat16().view(2, 1, 4)
    wanted = wanted + torch.arange(group.world_size).bfloat16()[:, None]
    with mock.patch.object(peer_words, "_late", yielding(peer_words._late)):
        found = share_words(own, buffers)
    return "" if torch.equal(found, wanted) else f"{found.tolist()}"


def uncombined(group: RankGroup) -> str:
    """Tokens with states of 4 splits, of one, and of none: a row past the batch. The last rank may
    have as many splits as the others, or have combined them, which is another kernel."""
    buffers, world, kv_heads, rows, size = shared_buffers(group), group.world_size, 2, 6, 6
    kinds = (torch.float32, False), (torch.float32, True), (torch.bfloat16, False)
    for dtype, last_combines in kinds:
        states, given = [], None
        for rank in range(world):
            draw = torch.Generator().manual_seed(rank)
            heads = kv_heads * world
            outs, lses = torch.randn(40, rows, size, generator=draw), torch.randn(40, rows)
            lses = 3 * torch.randn(40, rows, generator=draw)
            lses[3] = -torch.inf
            partial = torch.randn(3, heads, size, generator=draw).to(dtype)
            partial_lse = torch.randn(3, heads, generator=draw)
            headers = torch.tensor([3 << 15 | 4, 2 << 15 | 4, 1, 1, 5 << 15 | 3, 5])
            first_row = torch.tensor([0, world, 0])  # of the third token none is read
            headers = headers.view(3, kv_heads) | (first_row << 9)[:, None]
            whole, whole_lse = partial.clone(), partial_lse.clone()
            for kv_head, first in enumerate((3, 2)):
                places = [first, *((first // 2 + split * kv_heads) * 2 for split in (1, 2, 3))]
                for head in range(world):
                    weights = (lses[places, head] * math.log(2)).softmax(0)
                    place = kv_head * world + head
                    whole[0, place] = (outs[places, head] * weights[:, None]).sum(0)
                    whole_lse[0, place] = (lses[places, head] * math.log(2)).logsumexp(0)
            partial[0], partial_lse[0] = torch.nan, torch.nan
            whole[2], whole_lse[2] = 0, -torch.inf
            states.append((whole.float(), whole_lse))
            if rank == group.rank:
                starts = torch.tensor([0, 1, 2]).int()
                splits = SplitStates(outs, lses, headers.int().flatten(), starts, rows)
                given = partial, partial_lse, splits
                if last_combines and rank == world - 1:
                    given = whole, whole_lse, None
        assert given is not None
        out, lse = torch.empty(3, kv_heads, size, dtype=dtype), torch.empty(3, kv_heads)
        at_once = 1 << 14 if dtype == torch.float32 else 32  # all splits, or 1 or 2
        with (
            mock.patch.object(peer_words, "_late", yielding(peer_words._late)),
            mock.patch("attnlib.ops.triton.peer_words._SPLIT_ELEMENTS", at_once),
        ):
            merge_words(*given[:2], out, lse, buffers, num_kv_heads=2, sinks=None, splits=given[2])
        own = slice(group.rank, None, world)
        parts, logits = (torch.stack([each[n][:, own] for each in states]) for n in (0, 1))
        weights = torch.where(logits == -torch.inf, 0.0, logits.softmax(0))
        wanted = (parts * weights[..., None]).sum(0)
        error = float((out.float() - wanted).abs().max())
        expected_lse = logits.logsumexp(0)
        same = torch.where(expected_lse == lse, 0.0, expected_lse - lse).abs().max()
        if not (error <= (2e-2 if dtype == torch.bfloat16 else 1e-5) and same <= 1e-5):
            return f"{dtype}: error {error:g}, of LSEs {float(same):g}"
    return ""


def full_buffers(group: RankGroup) -> str:
    """What does not fit is exchanged by messages, queries and results alike."""
    run = Run(Problem({"has_sink": True}), group)
    layer = run.layer.exchange
    layer._peers = shared_buffers(group)
    layer._sizes = (1 << 30, 1 << 30)
    errors = [error_of(*run.step(STEPS[name])) for name in ("prefill", "mixed", "decode")]
    return "" if max(errors) <= LIMIT else f"errors {errors}"


def refused(group: RankGroup) -> str:
    """By all ranks, with the reason."""
    found = []
    changes: tuple[dict[str, Any], ...] = ({}, {"dtype": torch.float64}, {"batch_invariant": True})
    for spec in changes:
        try:
            Run(Problem(spec, options={"exchange": "peer_memory"}), group)
        except (UnsupportedConfigError, ContractError) as error:
            found.append(str(error))
    wanted = ("NVIDIA GPUs of one host", "float64", "large batches")
    named = len(found) == 3 and all(map(str.__contains__, found, wanted))
    return "" if named else f"{found}"


ANY_NUMBER = ("peer memory", "queries between words", "full buffers", "uncombined")
"""Cases of any number of ranks."""
CASES: dict[str, Callable[[RankGroup], str]] = {
    "peer memory": peer_memory,
    "a rank ahead": a_rank_ahead,
    "words of long ago": words_of_long_ago,
    "a rank that never comes": a_rank_that_never_comes,
    "after a lost exchange": after_a_lost_exchange,
    "two streams": two_streams,
    "queries between words": queries_between_words,
    "full buffers": full_buffers,
    "uncombined": uncombined,
    "decodes by Triton": decodes_by_triton,
    "refused on a CPU": refused,
}
