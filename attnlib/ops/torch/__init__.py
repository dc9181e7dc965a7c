"""The torch twin: every operation in plain torch, on any device, for anything that the rules can say.

It is the reference that says what is right, and on a CPU it is meant to be quick: paged attention goes through torch's
own fused attention wherever that says the same. Besides the operations that both twins have, `scores.attention_scores`
returns the weights themselves.
"""
