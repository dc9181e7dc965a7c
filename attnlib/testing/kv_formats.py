"""The checks of a KV format under test."""

from __future__ import annotations

from attnlib.testing.checks.kv_format_caches import CACHE_CHECKS
from attnlib.testing.checks.kv_format_numbers import NUMBER_CHECKS

__all__ = ["KV_FORMAT_CHECKS"]

KV_FORMAT_CHECKS = (*NUMBER_CHECKS, *CACHE_CHECKS)
"""What `attnlib verify --kv-format` runs."""
