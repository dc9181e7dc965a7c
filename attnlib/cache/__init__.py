"""The paged KV cache: how it lies in memory, who holds which block, where a token goes.

In: a spec and lengths. Out: `PagedKVCache` (two strided views, P1), block ids, a block table (P3) and slots (P4). Next: `attnlib.metadata`,
which puts table and slots into the batch's metadata.
"""
