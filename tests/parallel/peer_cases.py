"""Cases of exchanges by memory, with Triton's interpreter and memory that processes share."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.triton.kernels import peer_words
from attnlib.ops.triton.peer_words import merge_words, share_words
from attnlib.parallel import RankGroup, exchange, warmup_parallel
from attnlib.workspace import BatchLimits
from tests.parallel.cases import LATENT, LIMIT
from tests.parallel.problem import BLOCK, STEPS, Problem, Run, error_of


def shared_buffers(group: RankGroup) -> PeerBuffers:
    """Buffers in memory that all processes map, as GPUs map each other's."""
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
    return PeerBuffers.of(found, group.rank)


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
    buffers = shared_buffers(group)
    with (
        mock.patch.object(RankGroup, "peers", lambda *_: buffers),
        mock.patch.object(exchange, "operation", by_memory),
        mock.patch.object(peer_words, "_late", yielding(peer_words._late)),
    ):
        for spec in ({"has_sink": True}, LATENT):
            run = Run(Problem(spec, options={"exchange": "peer_memory"}), group)
            limits = BatchLimits(max_num_reqs=2, max_num_tokens=2, max_seq_len=2 * BLOCK)
            warmup_parallel(run.layer, run.caches[1], limits)
            for name in ("short", "prefill", "mixed", "decode", "verification"):
                error = error_of(*run.step(STEPS[name]))
                if not error <= LIMIT:
                    return f"{spec}, {name}: error {error:g}"
    # Of two layers, two warm-ups and four steps, one of which has a state over new tokens.
    runs = [int(each.max()) for each in (buffers.share_counts, buffers.merge_counts)]
    return "" if runs == [12, 10] else f"{runs} exchanges of queries and results"


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
            partial = torch.full((2, 2, 4), 10.0 * number + group.rank)
            out, lse = torch.empty(2, 1, 4), torch.empty(2, 1)
            states = partial, torch.zeros(2, 2), out, lse, buffers
            merge_words(*states, num_kv_heads=1, sinks=None)
            if not torch.equal(out, torch.full_like(out, 10.0 * number + 0.5)):
                wrong += f"results of exchange {number}: {out.tolist()} "
    return wrong  # not before the other rank has what it waits for


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


ANY_NUMBER = ("peer memory", "queries between words", "full buffers")
"""Cases of any number of ranks."""
CASES: dict[str, Callable[[RankGroup], str]] = {
    "peer memory": peer_memory,
    "a rank ahead": a_rank_ahead,
    "queries between words": queries_between_words,
    "full buffers": full_buffers,
    "refused on a CPU": refused,
}
