"""Every operation in plain torch: any device, every feature of the M-rules.

This is the reference implementation. On a CPU it is also optimized: paged attention uses torch's
fused attention wherever that computes the same result. In addition to the operations that
`ops.triton` has, `scores.attention_scores` returns attention weights.
"""
