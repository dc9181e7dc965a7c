"""Benchmark of divided layers; see `__main__`."""
