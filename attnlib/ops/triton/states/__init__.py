"""Recurrent states as Triton kernels, for slots of the form `tail` (T9).

The operations are those of `ops.torch.states`. They read lengths, slots and positions on the
device, so a captured CUDA graph serves other batches, and they check neither slots nor positions.
"""
