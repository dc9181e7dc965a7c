"""The Triton twin: the same operations as `ops.torch`, as plain Triton kernels for NVIDIA and AMD GPUs.

    cache_write, slots                      where new keys and values go
    paged_decode, paged_prefill             attention over the paged cache: memory-bound and compute-bound batches
    varlen_prefill, merge_states            attention without a cache; joining two partial results
    attend, mask, softmax, quant, schedule  what the attention kernels share: the loop over keys and its parts
    tiles, tile_tables, tile_entries        host side: pure choices of tiles, from tables/*.json
    splits, decode_numbers                  how far keys are split, and the numbers of it, from tables/decode.json
    device, arguments                       chip limits, argument preparation
    launch, direct                          launches that are bound once, and the C function beneath Triton's launcher
    gluon, hopper/                          the door to the Gluon kernels of one chip, and these kernels

Only this folder imports triton. Under `TRITON_INTERPRET=1`, set before triton is first imported, everything runs on
CPU tensors.
"""
