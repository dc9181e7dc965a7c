"""Hybrid memory on a GPU: strided caches of a pool, null blocks, and models over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup, StateGroup, with_equal_blocks
from attnlib.cache.hybrid_allocator import HybridBlockAllocator
from attnlib.metadata.groups import group_batches
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CHUNKS = [700, 1, 1, 300, 1, 900, 1, 1]


@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("window", [None, 128, 500])
def test_blocks_behind_a_window_change_no_bit(window: int | None, stored: str) -> None:
    """P5, P12: with null blocks, and NaN in every free block, decodes and prefills have the bits of
    the same pool with all blocks."""
    torch.manual_seed(0)
    full = attnlib.AttentionSpec(
        num_heads=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, block_size=16,
        kv_cache_dtype=stored,
    )  # fmt: skip
    groups = with_equal_blocks(
        {
            "full": KVCacheGroup(full, 1),
            "layer": KVCacheGroup(full.replace(sliding_window=window or 64), 2),
        }
    )
    name = "full" if window is None else "layer"
    spec = groups[name].spec
    layer = attnlib.Attention(spec, backend="triton", device="cuda")
    builder = layer.backend.make_builder(spec, "cuda")
    num_blocks = 512
    allocator = HybridBlockAllocator(groups, num_blocks, prefix_caching=False)
    pool, whole = (HybridKVCache(groups, num_blocks, "cuda") for _ in range(2))
    contiguous = attnlib.PagedKVCache.allocate(spec, num_blocks, "cuda")
    caches: list[Any] = [x.caches[name][-1] for x in (pool, whole)]
    sequences = [allocator.start() for _ in range(3)]
    columns = -(-sum(CHUNKS) // spec.block_size)
    rows = [list(range(1 + n * columns, 1 + (n + 1) * columns)) for n in range(3)]
    done = 0
    for count in CHUNKS:
        for one in sequences:
            allocator.grow(one, done + count)
        q, k, v = (
            torch.randn(3 * count, heads, 128, device="cuda").bfloat16() for heads in (16, 2, 2)
        )
        outs = []
        freed = allocator.block_tables(sequences)[name]
        tables = ((freed, caches[0]), (rows, caches[1]), (rows, contiguous))
        for table, cache in tables:
            common = attnlib.CommonAttentionMetadata.from_lengths(
                [count] * 3, [done + count] * 3, table, spec.block_size, "cuda"
            )
            outs.append(layer(q, k, v, cache, builder.build(0, common)))
        assert torch.equal(outs[0], outs[1]), (window, done, count)
        torch.testing.assert_close(outs[1], outs[2], rtol=2e-2, atol=2e-2)
        assert outs[0].isfinite().all()
        done += count
        for one in sequences:
            allocator.advance(one, list(range(done)))
        held = {b for one in sequences for ids in one.blocks.values() for b in ids} | {0}
        pool._storage[[b for b in range(num_blocks) if b not in held]] = 0xFF  # NaN
    used = allocator.num_used_blocks("layer")
    assert used <= 3 * (-(-(window or 64) // groups["layer"].block_size) + 1)


@pytest.mark.parametrize(
    ("latent", "stored"),
    [(False, "auto"), (True, "auto"), (False, "int8_per_token_head"), (False, "nvfp4")],
)
def test_pages_of_blocks_beside_states(latent: bool, stored: str) -> None:
    """The kernels read pages of 16 tokens of blocks that are as large as a state, in a pool whose
    other blocks hold NaN, as they read a contiguous cache."""
    torch.manual_seed(0)
    sizes = {"head_size": 576, "head_size_v": 512, "use_mla": True} if latent else {}
    spec = attnlib.AttentionSpec(
        num_heads=16, num_kv_heads=1 if latent else 2, dtype=torch.bfloat16, block_size=16,
        kv_cache_dtype=stored, **{"head_size": 128, **sizes},
    )  # fmt: skip
    states = attnlib.StateSpec(
        num_heads=8, key_size=128, value_size=128, dtype=torch.bfloat16, form="plain"
    )
    groups = with_equal_blocks({"keys": KVCacheGroup(spec, 1), "states": StateGroup(states, 2)})
    group, num_blocks = groups["keys"], 40
    assert group.page_size is not None and group.block_size % group.page_size == 0
    spec = group.layer_spec
    layer = attnlib.Attention(spec, backend="triton", device="cuda")
    builder = layer.backend.make_builder(spec, "cuda")
    allocator = HybridBlockAllocator(groups, num_blocks)
    pool = HybridKVCache(groups, num_blocks, "cuda")
    pool._storage[1:] = 0xFF  # NaN
    pages = -(-sum(CHUNKS) // spec.block_size)
    contiguous = attnlib.PagedKVCache.allocate(spec, 3 * pages, "cuda")
    rows = [list(range(n * pages, (n + 1) * pages)) for n in range(3)]
    sequences = [allocator.start() for _ in range(3)]
    done = 0
    for count in CHUNKS:
        for one in sequences:
            allocator.grow(one, done + count)
        tokens = 3 * count
        q = torch.randn(tokens, 16, spec.head_size, device="cuda").bfloat16()
        k = torch.randn(tokens, spec.num_kv_heads, spec.head_size, device="cuda").bfloat16()
        v = k[..., : spec.head_size_v] if latent else torch.randn_like(k)
        batch = group_batches(allocator, sequences, [count] * 3, "cuda")["keys"]
        assert isinstance(batch, attnlib.CommonAttentionMetadata)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [count] * 3, [done + count] * 3, rows, spec.block_size, "cuda"
        )
        got = layer(q, k, v, pool.caches["keys"][0], builder.build(0, batch))
        wanted = layer(q, k, v, contiguous, builder.build(0, common))
        assert got.isfinite().all(), (done, count)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        done += count
        for one in sequences:
            allocator.advance(one, list(range(done)))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3n", "gemma4"])
def test_models_over_a_pool(name: str) -> None:
    """Tokens of the triton backend equal eager attention of the same model on the GPU."""
    pytest.importorskip("transformers")
    from tests.integrations.tiny_models import prompts
    from tests.integrations.transformers import test_hybrid_model as models

    if name not in models.MODELS:
        pytest.skip("not in this version of transformers")
    model = models.MODELS[name]().to("cuda")
    sequences = prompts(25, 9)
    engine = models.Engine(model, backend="triton")
    assert engine.generate(sequences, 12) == models._expected(model, sequences, 12)
