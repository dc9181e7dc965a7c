"""An encoder layer over packed sequences, then a causal one with a window on each side."""

import torch

from attnlib.compat.vllm.v1.attention.ops.triton_prefill_attention import (
    context_attention_fwd,
    get_block_size,
)

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 80

torch.manual_seed(0)
lengths = torch.tensor([7, 33, 1, 12])
block = get_block_size(torch.float32)
padded = -(-int(lengths.sum()) // block) * block  # rows in whole blocks
starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
hidden = torch.randn(padded, HEADS * HEAD_SIZE)
weights = torch.randn(HEADS * HEAD_SIZE, (HEADS + 2 * KV_HEADS) * HEAD_SIZE) * 0.05


def layer(hidden: torch.Tensor, **options: object) -> torch.Tensor:
    heads = (hidden @ weights).view(padded, -1, HEAD_SIZE)
    query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    output = torch.zeros_like(query)
    context_attention_fwd(
        query, key, value, output, starts[:-1], lengths, int(lengths.max()), **options
    )
    return hidden + output.flatten(1)


encoded = layer(hidden, is_causal=False)
windowed = layer(encoded, is_causal=False, sliding_window_q=4, sliding_window_k=2)
causal = layer(windowed, softmax_scale=0.1, sliding_window_q=8)

result = encoded, windowed, causal
print([round(float(out.abs().mean()), 3) for out in result])
