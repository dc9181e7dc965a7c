"""Triton counterparts of the operations of `ops.torch`, for NVIDIA and AMD GPUs.

    attention_call, batch_tensors  one call, and the tensors that all layers of a step share
    launch/run                     finds or prepares the launches of a call, and launches them
    cache_write, slots             KV slots of new tokens, and writing their keys and values
    paged_decode, paged_prefill    attention over the paged cache
    decode_schedule, prepare_decode  splits of a decode, and its launches
    paged_mixed                    the overlap of decodes and prefills on Hopper
    varlen_prefill, merge_states   attention without a cache; merging two partial results
    kernels/                       jit code of the portable kernels
    hopper/                        Gluon kernels for Hopper (SM90), used where they are faster
    launch/                        call signatures, argument order, launches without Triton's Python
    heuristics/                    tiles, splits and chip limits: pure functions, and their tables

Only this package imports triton. With TRITON_INTERPRET=1, set before triton is first imported, the
portable kernels run on CPU tensors.
"""
