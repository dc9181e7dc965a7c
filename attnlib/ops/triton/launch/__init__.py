"""Kernel launches: call signatures, the launch cache, bound launches, and driver calls."""
