"""The paged KV cache: memory layout, block allocation and slot mapping.

Input: an `AttentionSpec` and sequence lengths. Output: a `PagedKVCache` (two strided views, P1),
block ids, a block table (P3) and a slot mapping (P4). `attnlib.metadata` puts the table and the
slots into the metadata of a batch. Layers with a recurrent state keep it in a `StateCache`.
"""
