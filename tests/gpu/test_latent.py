"""`LatentAttention` on a GPU at DeepSeek's sizes: both forms against float64, and in a graph."""

from __future__ import annotations

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.mla.latent_attention import LatentAttention
from attnlib.spec import AttentionSpec
from tests.gpu.devices import backend_or_skip, batch_of, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

KEY, VALUE, LATENT, ROTARY = 128, 128, 512, 64


def _run(
    heads: int, query_lens: list[int], seq_lens: list[int], expand_from: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, its expectation in float64 over the stored latents)."""
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_size=LATENT + ROTARY, head_size_v=LATENT,
        dtype=torch.bfloat16, block_size=64, use_mla=True,
    )  # fmt: skip
    backend = backend_or_skip("triton", spec)
    draw = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=draw).to(torch.bfloat16)

    weights = (random(heads, KEY + VALUE, LATENT).float() * LATENT**-0.5).to(torch.bfloat16)
    module = LatentAttention(
        spec, weights, KEY, backend=backend, expand_from=expand_from, device="cuda"
    )
    blocks = len(seq_lens) * -(-max(seq_lens) // 64)
    cache = PagedKVCache.allocate(spec, blocks, "cuda")
    cache.key_cache.copy_(random(*cache.key_cache.shape))
    common = batch_of(spec, query_lens, seq_lens, blocks, seed=0)
    metadata = backend.make_builder(spec, "cuda").build(0, common)
    query, new = random(sum(query_lens), heads, KEY + ROTARY), random(sum(query_lens), 576)
    out = module(query, new, cache, metadata)
    expected = torch.empty_like(out, dtype=torch.float64)
    begin = 0
    for request, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        table = common.block_table_tensor[request, : -(-length // 64)].long()
        rows = cache.key_cache[table].flatten(0, 2)[:length].double()
        both = torch.einsum("hnr,tr->htn", weights.double(), rows[:, :LATENT])
        rotary = rows[None, :, LATENT:].expand(heads, -1, -1)
        keys = torch.cat((both[..., :KEY], rotary), -1)
        part = slice(begin, begin + count)
        scores = query[part].double().transpose(0, 1) @ keys.transpose(1, 2) * 192**-0.5
        positions = torch.arange(length - count, length, device="cuda")[:, None]
        hidden = torch.arange(length, device="cuda") > positions
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected[part] = (shares @ both[..., KEY:]).transpose(0, 1)
        begin += count
    return out, expected


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1, 1, 1], [1000, 4097, 33]),
        ([4, 1], [700, 2000]),
        ([1, 300, 77], [500, 1700, 77]),
    ],
)
@pytest.mark.parametrize("expand_from", [None, 1])
def test_both_forms(
    heads: int, query_lens: list[int], seq_lens: list[int], expand_from: int | None
) -> None:
    """M12: errors of the size of bfloat16's rounding of queries, keys and outputs."""
    out, expected = _run(heads, query_lens, seq_lens, expand_from)
    scale = float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) < 0.02 * scale
    assert float((out.double() - expected).abs().mean()) < 0.002 * scale
