"""What a builder of the `triton` backend declares: workspace of prefills, batches of a warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.composite import make_composite
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.backends.triton.declared import prefill_bytes, warmup_lengths
from attnlib.backends.triton.scheduler import Scheduler
from attnlib.layer.warmup_batches import warmup_batches
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of_cpu
from attnlib.ops.triton.heuristics.splits import (
    MOST_PREFILL_ROWS,
    paged_decode_workspace_bytes,
    prefill_splits,
)
from attnlib.ops.triton.hopper.latent_plan import latent_decode_workspace_bytes
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

H100 = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
LIMITS = BatchLimits(max_num_reqs=16, max_num_tokens=2048, max_seq_len=50_000)
BASE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def _scheduler(**changes: Any) -> Scheduler:
    spec = AttentionSpec(**{**BASE, **changes})
    with limits_of_cpu(H100):
        return Scheduler.of(spec, torch.device("cpu"), "auto", 8)


@pytest.mark.parametrize("rows", [16, 64, 128, MOST_PREFILL_ROWS])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (5, 1), (64, 64)])
def test_declared_workspace_holds_every_prefill(rows: int, heads: int, kv_heads: int) -> None:
    """M7: whatever rows a tile has, of every number of tokens and requests."""
    declared = prefill_bytes(_scheduler(num_heads=heads, num_kv_heads=kv_heads), LIMITS)
    group, most = heads // kv_heads, 0
    tile_tokens = max(1, rows // group)
    for tokens in (9, 64, 100, 333, 1000, 2048):
        for reqs in (1, 2, 3, 16):
            tiles = min(reqs * -(-tokens // tile_tokens), tokens // tile_tokens + reqs)
            for seq_len in (2049, 5000, 50_000):
                splits = prefill_splits(tiles * kv_heads, seq_len, seq_len, H100.num_sms)
                need = paged_decode_workspace_bytes(tokens, heads, 64, splits)
                most = max(most, need)
    assert 0 < most <= declared


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_invariant": True},
        {"sliding_window": 500, "block_size": 16},
        {"num_heads": 128, "num_kv_heads": 128},
    ],
)
def test_layers_that_divide_no_keys_declare_nothing(changes: dict[str, Any]) -> None:
    limits = BatchLimits(max_num_reqs=16, max_num_tokens=512, max_seq_len=50_000)
    scheduler = _scheduler(**changes)
    assert prefill_bytes(scheduler, limits) == 0
    assert list(warmup_lengths(scheduler, limits, 8)) == []
    short = BatchLimits(max_num_reqs=16, max_num_tokens=512, max_seq_len=2048)
    assert prefill_bytes(_scheduler(), short) == 0 == len([*warmup_lengths(_scheduler(), short, 8)])


def test_a_warm_up_runs_the_shortest_prefills_of_each_class_of_rows() -> None:
    """Alone they divide the keys, behind a decode and in large batches they do not."""
    lengths = list(warmup_lengths(_scheduler(), LIMITS, 8))
    shortest = [9, 17, 33, 65, 129, 257, 513, 1025]
    assert [one for one in lengths if len(one) == 1] == [(query_len,) for query_len in shortest]
    assert [one[1] for one in lengths if one[0] == 1] == shortest
    counts = {one[0]: len(one) for one in lengths if one[0] > 1}
    assert counts == {9: 16, 17: 16, 33: 16, 65: 16, 129: 15, 257: 7, 513: 3, 1025: 1}
    assert all(sum(one) <= 2048 and len(one) <= 16 for one in lengths)
    alone = BatchLimits(max_num_reqs=1, max_num_tokens=40, max_seq_len=50_000)
    assert {*warmup_lengths(_scheduler(), alone, 8)} == {(9,), (17,), (33,)}
    five = warmup_lengths(_scheduler(num_heads=5, num_kv_heads=1), alone, 8)
    assert {*five} == {(9,), (13,), (26,)}  # rows 45, 65, 130


def test_prefills_over_latents() -> None:
    """P10, M7: their workspace holds the partial results of every number of tokens, and a warm-up
    runs the shortest prefill whose requests are not divided."""
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
    for heads, tokens in ((16, 529), (128, 67), (5, 1585)):
        scheduler = _scheduler(**latent, num_heads=heads)
        lengths = list(warmup_lengths(scheduler, LIMITS, 8))
        assert (tokens,) in lengths and (1, tokens) in lengths
        declared = prefill_bytes(scheduler, LIMITS)
        need = latent_decode_workspace_bytes(LIMITS.max_num_tokens, heads, 2048, 132)
        assert 0 < need <= declared


def test_the_workspace_of_a_mixed_batch_over_latents_serves_both_parts() -> None:
    """M7: nothing is allocated besides the declared memory."""
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
    spec = AttentionSpec(**{**BASE, **latent, "num_heads": 16, "block_size": 64})
    with limits_of_cpu(H100):
        builder = TritonBackend.make_builder(spec, "cpu", limits=LIMITS)
        batch = ([1, 40], [3000, 3000], torch.zeros(2, 800).int(), 64, "cpu")
        held = builder.workspace_bytes
        metadata = builder.build(0, CommonAttentionMetadata.from_lengths(*batch))
    assert metadata.num_decodes == metadata.num_prefills == 1
    needed = latent_decode_workspace_bytes(40, 16, 40, 132)
    assert needed <= metadata.workspace.nbytes <= held == builder.workspace_bytes


@pytest.mark.parametrize(("prefill", "ctas"), [((1024, 1024), 88), ((1024, 4096), 48)])
def test_a_decode_beside_a_prompt_keeps_its_multiprocessors(
    prefill: tuple[int, int], ctas: int
) -> None:
    """16 verifications over 4k keys: the keys of the prefill count, not the longest ones."""
    spec = AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    lengths = [*([4] * 16), prefill[0]], [*([4096] * 16), prefill[1]]
    with limits_of_cpu(H100):
        builder = TritonBackend.make_builder(spec, "cpu")
        table = torch.zeros(17, 256).int()
        metadata = builder.build(
            0, CommonAttentionMetadata.from_lengths(*lengths, table, 16, "cpu")
        )
        assert metadata.concurrent_schedule.max_ctas == ctas


def test_composites_warm_up_the_batches_of_both() -> None:
    spec = AttentionSpec(**BASE)
    limits = BatchLimits(max_num_reqs=2, max_num_tokens=64, max_seq_len=50_000)
    found = []
    for backend in (TritonBackend, make_composite(TritonBackend, TorchBackend), TorchBackend):
        found.append(backend.make_builder(spec, "cpu", limits=limits).warmup_lengths(limits))
    assert found[0] == found[1] and found[0] and found[2] == []
    assert not set(found[0]) <= set(warmup_batches(limits, 8))
