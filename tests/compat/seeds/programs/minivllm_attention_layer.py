"""Two prompts and three greedy steps through MinivLLM's attention layer."""

import torch

from attnlib.compat.minivllm import Attention, set_context

BLOCK_SIZE, NUM_BLOCKS = 16, 8
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 32, 50

torch.manual_seed(0)
embedding = torch.randn(VOCABULARY, HEADS * HEAD_DIM)
projection = torch.randn(HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM) * 0.1
layer = Attention(
    num_heads=HEADS, head_dim=HEAD_DIM, scale=1.0, num_kv_heads=KV_HEADS, block_size=BLOCK_SIZE
)
layer.k_cache, layer.v_cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)

prompts = [torch.randint(VOCABULARY, (n,)) for n in (5, 14)]
lengths = [len(prompt) for prompt in prompts]
tables = torch.tensor([[3, -1], [6, 1]])


def slot(sequence: int, position: int) -> int:
    return int(tables[sequence, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def step(tokens: torch.Tensor) -> torch.Tensor:
    hidden = embedding[tokens]
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    return hidden + layer(*(hidden @ projection).split(sizes, dim=1))


starts = torch.tensor([0, *lengths]).cumsum(0)
slots = [slot(sequence, i) for sequence, n in enumerate(lengths) for i in range(n)]
set_context(True, cu_seqlens_q=starts, cu_seqlens_k=starts, slot_mapping=torch.tensor(slots))
hidden = step(torch.cat(prompts))[starts[1:] - 1]

generated = []
for _ in range(3):
    tokens = (hidden @ embedding.T).argmax(1)
    generated.append(tokens.tolist())
    slots = [slot(sequence, n) for sequence, n in enumerate(lengths)]
    lengths = [n + 1 for n in lengths]
    set_context(
        False,
        slot_mapping=torch.tensor(slots),
        context_lens=torch.tensor(lengths),
        block_tables=tables,
    )
    hidden = step(tokens)

result = generated, hidden, layer.k_cache, layer.v_cache
print(generated)
