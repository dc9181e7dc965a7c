"""Two sequences over PagedAttention's cache: prefix, decode, a copied block, a swap to the host."""

import torch

from attnlib.compat.vllm.ops.paged_attn import PagedAttention, PagedAttentionMetadata

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 4, 2, 64
SCALE = HEAD_SIZE**-0.5

torch.manual_seed(0)
assert HEAD_SIZE in PagedAttention.get_supported_head_sizes()
shape = PagedAttention.get_kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
kv_cache = torch.zeros(shape)
caches = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, HEAD_SIZE)
one = torch.tensor(1.0)
tables = torch.tensor([[2, 5], [7, 0]], dtype=torch.int32)
lengths = [20, 9]


def write(key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
    PagedAttention.write_to_paged_cache(key, value, *caches, torch.tensor(slots), "auto", one, one)


def slot(sequence: int, position: int) -> int:
    return int(tables[sequence, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


# The first 12 and 4 tokens are in the cache, the others are new.
cached = [12, 4]
key, value = torch.randn(2, sum(lengths), KV_HEADS, HEAD_SIZE)
query = torch.randn(sum(lengths), HEADS, HEAD_SIZE)
slots = [slot(s, i) for s, n in enumerate(lengths) for i in range(n)]
old = [*range(12), *range(20, 24)]
new = [i for i in range(sum(lengths)) if i not in old]
write(key[old], value[old], [slots[i] for i in old])
starts = torch.tensor([0, lengths[0] - cached[0], len(new)], dtype=torch.int32)
metadata = PagedAttentionMetadata(torch.tensor(lengths, dtype=torch.int32), 0, tables)
prefix = PagedAttention.forward_prefix(
    query[new], key[new], value[new], "auto", *caches, metadata.block_tables, starts,
    metadata.seq_lens_tensor, 8, None, None, one, one,
)  # fmt: skip
write(key[new], value[new], [slots[i] for i in new])

decoded = []
for _ in range(3):
    key, value = torch.randn(2, 2, KV_HEADS, HEAD_SIZE)
    write(key, value, [slot(sequence, n) for sequence, n in enumerate(lengths)])
    lengths = [n + 1 for n in lengths]
    metadata = PagedAttentionMetadata(
        torch.tensor(lengths, dtype=torch.int32), max(lengths), tables
    )
    decoded.append(
        PagedAttention.forward_decode(
            torch.randn(2, HEADS, HEAD_SIZE),
            *caches,
            metadata.block_tables,
            metadata.seq_lens_tensor,
            metadata.max_decode_seq_len,
            "auto",
            KV_HEADS,
            SCALE,
            None,
            one,
            one,
        )  # fmt: skip
    )

# A second branch of the first sequence gets a copy of its last block; the host keeps the second.
PagedAttention.copy_blocks([kv_cache], torch.tensor([[5, 3]]))
host = torch.zeros(2, 2, *shape[2:])
PagedAttention.swap_blocks(kv_cache, host, torch.tensor([[7, 1]]))
branches = PagedAttention.forward_decode(
    torch.randn(1, HEADS, HEAD_SIZE).repeat(2, 1, 1), *caches,
    torch.tensor([[2, 5], [2, 3]], dtype=torch.int32), torch.tensor([23, 23], dtype=torch.int32),
    23, "auto", KV_HEADS, SCALE, torch.tensor([0.5, 0.25, 0.125, 0.0625]), one, one,
)  # fmt: skip

result = prefix, decoded, branches, host, kv_cache
print([round(float(out.abs().mean()), 3) for out in (prefix, *decoded, branches)])
print(bool(torch.equal(branches[0], branches[1])))
