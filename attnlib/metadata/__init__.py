"""Metadata of a batch: what all layers and backends share, and what a backend derives from it.

Input: lengths, block table and slot mapping. Output: `CommonAttentionMetadata`, which the metadata
builder of a backend turns into its own metadata, once per batch.
"""
