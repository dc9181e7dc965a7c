"""Threads and asyncio tasks share selection, layers and module-level caches."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnlib
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.selection import selector
from tests.properties.check import Outcome, run_draw
from tests.properties.draw import Limits, draw_of

LIMITS = Limits(longest=40, longest_query=12, most_heads=8)
THREADS = 8


@pytest.fixture(autouse=True)
def _frequent_switches() -> object:
    """Let threads take turns between almost any two instructions."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(threads)


def _run(seed: int) -> Outcome:
    return run_draw(draw_of(seed, LIMITS), "torch", "cpu")


def test_threads_run_draws_at_the_same_time() -> None:
    """Half of the jobs repeat the specs of others, so that threads also share groups."""
    selector._cache.clear()
    LAUNCHES.clear()
    with ThreadPoolExecutor(THREADS) as pool:
        outcomes = list(pool.map(_run, [*range(80), *range(80)]))
    assert not [outcome.wrong for outcome in outcomes if outcome.wrong]


def test_threads_share_one_layer_and_one_batch() -> None:
    """Each thread has its own cache and tensors; the plan of the batch is made by all at once."""
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
    )
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    builder = layer.backend.make_builder(spec, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 5], [9, 5], [[0, 1, 2], [3, 4]], 4, "cpu"
    )

    def inputs(job: int) -> tuple[torch.Tensor, ...]:
        rng = torch.Generator().manual_seed(job)
        return tuple(torch.randn(6, heads, 16, generator=rng) for heads in (4, 2, 2))

    def run(metadata: object, job: int) -> torch.Tensor:
        cache = attnlib.PagedKVCache.allocate(spec, 6, "cpu")
        return layer(*inputs(job), cache, metadata)

    expected = [run(builder.build(0, common), job) for job in range(64)]
    for _ in range(5):
        metadata = builder.build(0, common)
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(lambda job, batch=metadata: run(batch, job), range(64)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tasks_have_their_own_backend() -> None:
    """`use_backend` belongs to a task, also across awaits and in threads that it starts."""
    spec = attnlib.AttentionSpec(num_heads=2, head_size=16, dtype=torch.float32)

    async def work(name: str, number: int) -> list[str]:
        seen = []
        with attnlib.use_backend(name):
            for _ in range(5):
                await asyncio.sleep(0)
                seen.append(attnlib.get_attn_backend(spec, device="cpu").get_name())
                chosen = await asyncio.to_thread(attnlib.get_attn_backend, spec, None, "cpu")
                seen.append(chosen.get_name())
                assert not _run(number).wrong
        return seen

    async def everything() -> list[list[str]]:
        names = ["torch", "triton", "prefill:torch,decode:triton"] * 4
        return await asyncio.gather(*(work(name, i) for i, name in enumerate(names)))

    for number, seen in enumerate(asyncio.run(everything())):
        assert set(seen) == {["torch", "triton", "prefill:torch,decode:triton"][number % 3]}


def test_threads_share_a_pool_under_a_lock_of_the_engine() -> None:
    """`BlockAllocator` has no lock of its own: calls that hold one leave it consistent."""
    import threading

    pool, lock = attnlib.BlockAllocator(64, 4), threading.Lock()

    def request(number: int) -> None:
        tokens = [number % 5] * 9
        with lock:
            hit = pool.acquire_prefix(tokens)
            blocks = [*hit.block_ids, *pool.allocate(3 - len(hit.block_ids))]
            pool.commit(tokens, blocks)
        with lock:
            pool.free(blocks)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(request, range(400)))
    assert pool.num_used_blocks == 0 and pool.num_free_blocks == 64
