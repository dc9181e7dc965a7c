"""Shared by the adapters of third-party kernels: imports and output conversion."""
