"""Kernels: tensors in, tensors out.

Nothing here knows a spec, a backend or a batch object, so every function is usable alone. `ops.torch` and `ops.triton` are twins: the same
file holds the same operation under the same signature, and the conformance kit holds them to the same answers.
"""
