"""The pre-commit test: one request through cache, builder and layer, compared with the formula."""

import torch

import attnlib


def test_a_request_in_three_steps_matches_the_formula() -> None:
    torch.manual_seed(0)
    spec = attnlib.AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.float32,
        block_size=4,
        sliding_window=5,
        has_sink=True,
    )
    sinks = torch.randn(4)
    layer = attnlib.Attention(spec, sinks=sinks, device="cpu")
    pool, cache = attnlib.BlockAllocator(16, 4), attnlib.PagedKVCache.allocate(spec, 16, "cpu")
    blocks = pool.allocate(3)
    keys, values, queries = torch.randn(11, 2, 16), torch.randn(11, 2, 16), torch.randn(11, 4, 16)
    builder, outputs = layer.backend.make_builder(spec, "cpu"), []
    for start, end in ((0, 7), (7, 10), (10, 11)):  # prompt, chunk, decode
        batch = attnlib.CommonAttentionMetadata.from_lengths(
            [end - start], [end], [blocks], 4, "cpu"
        )
        outputs.append(
            layer(
                queries[start:end],
                keys[start:end],
                values[start:end],
                cache,
                builder.build(0, batch),
            )
        )
    found = torch.cat(outputs)

    position = torch.arange(11)
    visible = (position[None] <= position[:, None]) & (position[None] > position[:, None] - 5)
    for head in range(4):
        scores = (queries[:, head] @ keys[:, head // 2].T / 4).masked_fill(~visible, float("-inf"))
        weights = torch.cat([scores, sinks[head].expand(11, 1)], 1).softmax(-1)[:, :-1]
        assert torch.allclose(found[:, head], weights @ values[:, head // 2], atol=1e-5)
