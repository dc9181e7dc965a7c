"""Kernels for Hopper (SM90) in Gluon, where plain Triton leaves speed on the chip.

    dialect      what Gluon calls things, release by release; the only module that asks which Triton it is
    schedule     which work item is which tile of which request, and which keys it visits (device side)
    prefill      the warp-specialised prefill kernel
    descriptors  TMA descriptors of a paged cache, kept between calls
    tiles        shapes of tiles and rings: a pure choice from the tables
    paged_prefill  the public operation and the pure list of what it does not do

There is no interpreter for Gluon: off the chip these kernels are compiled, on it they are tested.
"""
