"""Helpers shared by adapters of optional packages: import probes and output conversion."""
