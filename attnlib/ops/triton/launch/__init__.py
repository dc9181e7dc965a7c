"""Launching compiled kernels: call signatures, the launch cache, bound launches, and the driver calls beneath them."""
