"""What a batch is: facts that all layers and backends share, and a backend's own view of them.

In: lengths, a block table and slots. Out: `CommonAttentionMetadata`, and from a backend's builder its `AttentionMetadata`. Next: the layer.
"""
