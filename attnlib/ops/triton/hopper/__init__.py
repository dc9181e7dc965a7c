"""Kernels for Hopper (SM90) in Gluon, where plain Triton leaves speed on the chip.

    limits       what the kernels take, without importing triton: asked by the operations and by `explain`
    choice       whether a call goes this way, and with which tile
    dialect      what Gluon calls things, release by release; the only module that asks which Triton it is
    schedule     which work item is which tile of which request, and which keys it visits (device side)
    softmax, products  the inner step: scores to weights, two products in flight around it
    prefill      the warp-specialised prefill kernel; paged_prefill launches it
    decode       the decode kernel, equal parts of all keys, and the join of pieces; paged_decode launches them
    descriptors  TMA descriptors of a paged cache and of queries, kept between calls
    tiles        shapes of tiles and rings: a pure choice from the tables

There is no interpreter for Gluon: off the chip these kernels are compiled, on it they are tested.
"""
