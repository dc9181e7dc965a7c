"""M15: decodes of batch-invariant layers whose queries see few keys, against prefills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec
from tests.gpu.devices import backend_or_skip, batch_of, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = "cuda"
CASES: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "num_heads": 64, "num_kv_heads": 8, "head_size": 64, "sliding_window": 128,
        "has_sink": True,
    },
    "cap, pages of 64": {"sliding_window": 200, "logits_soft_cap": 20.0, "block_size": 64},
    "group of 5, float16, LSE": {
        "num_heads": 10, "head_size": 96, "sliding_window": 100, "dtype": torch.float16,
        "needs_lse": True,
    },
    "chunks, pages of 256": {"head_size": 64, "attention_chunk_size": 256, "block_size": 256},
    "one KV head, window of 1": {"num_heads": 32, "num_kv_heads": 1, "sliding_window": 1},
}  # fmt: skip
LENGTHS = [1, 4, 63, 64, 65, 128, 129, 255, 257, 1000, 4096, 4097, 4160, 8191]
"""Around borders of tiles (64 keys), chunks and segments (4096 keys)."""


def _run(
    layer: attnlib.Attention, query: torch.Tensor, cache: Any, common: CommonAttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and LSE of one call."""
    metadata: Any = layer.backend.make_builder(layer.spec, DEVICE).build(0, common)
    if layer.spec.needs_lse:
        out, lse = layer(query, None, None, cache, metadata, return_lse=True)
        return out, lse
    return layer(query, None, None, cache, metadata), None


def _cache(spec: AttentionSpec, tables: torch.Tensor, lengths: list[int], num_blocks: int) -> Any:
    """A cache with NaN past the end of each request and in the blocks of none."""
    cache = attnlib.PagedKVCache.allocate(spec, num_blocks, DEVICE)
    unused = torch.ones(num_blocks, dtype=torch.bool)
    for table, length in zip(tables.tolist(), lengths, strict=True):
        unused[table[: -(-length // spec.block_size)]] = False
    for part in (cache.key_cache, cache.value_cache):
        part.normal_()
        part[unused.to(DEVICE)] = torch.nan
        for table, length in zip(tables.tolist(), lengths, strict=True):
            last = (length - 1) // spec.block_size
            part[table[last], length - last * spec.block_size :] = torch.nan
    return cache


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_decodes_have_the_bits_of_prefills(name: str, tokens: int) -> None:
    """Every request of a batch of decodes, among them requests without new tokens: alone, and as
    the end of a prefill; and close to the torch backend."""
    spec = spec_of(batch_invariant=True, **CASES[name])
    backend_or_skip("triton", spec)
    torch.manual_seed(0)
    lengths = [max(length, tokens) for length in LENGTHS]
    news = [tokens if number % 5 != 3 else 0 for number in range(len(lengths))]
    num_blocks = len(lengths) * -(-max(lengths) // spec.block_size)
    common = batch_of(spec, news, lengths, num_blocks, seed=1)
    tables = common.block_table_tensor
    assert tables is not None
    cache = _cache(spec, tables, lengths, num_blocks)
    sinks = torch.randn(spec.num_heads, device=DEVICE) if spec.has_sink else None
    layer = attnlib.Attention(spec, backend="triton", device=DEVICE, sinks=sinks)
    reference = attnlib.Attention(
        spec.replace(batch_invariant=False), backend="torch", device=DEVICE, sinks=sinks
    )
    query = torch.randn(sum(news), spec.num_heads, spec.head_size, device=DEVICE, dtype=spec.dtype)
    out, lse = _run(layer, query, cache, common)
    want, _ = _run(reference, query, cache, common)
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=1e-2)
    row = 0
    for request, (new, length) in enumerate(zip(news, lengths, strict=True)):
        rows = slice(row, row + new)
        row += new
        for earlier in (0, 100):
            queries = min(length, new + earlier)
            if new == 0 or (earlier > 0 and queries == new):
                continue
            part = CommonAttentionMetadata.from_lengths(
                [queries], [length], tables[request : request + 1], spec.block_size, DEVICE
            )
            before = torch.randn_like(query[:1].expand(queries - new, -1, -1))
            found, found_lse = _run(layer, torch.cat([before, query[rows]]), cache, part)
            assert torch.equal(found[queries - new :], out[rows]), (request, earlier)
            if lse is not None and found_lse is not None:
                assert torch.equal(found_lse[queries - new :], lse[rows]), (request, earlier)
