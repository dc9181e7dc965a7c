"""The checks of the conformance suite, one module for each group of requirements.

The id of a check is the id of the requirement that it covers. `CHECKS` is sorted so that cheap
checks with specific error messages run first.
"""

from __future__ import annotations

from attnlib.testing.check import Check
from attnlib.testing.checks import (
    accuracy,
    addressing,
    cache_exchange,
    cache_write,
    compressed_entries,
    cuda_graphs,
    determinism,
    empty_batches,
    float8_queries,
    host_overhead,
    key_indexer,
    key_selection,
    kv_sharing,
    latent,
    layer_groups,
    lse,
    null_blocks,
    packed_latents,
    page_formats,
    parameters,
    process_isolation,
    rotary_write,
    score_functions,
    step_plans,
    strides,
    unsupported,
    unused_memory,
    visibility,
)

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *visibility.CHECKS,
    *parameters.CHECKS,
    *score_functions.CHECKS,
    *key_selection.CHECKS,
    *key_indexer.CHECKS,
    *compressed_entries.CHECKS,
    *float8_queries.CHECKS,
    *layer_groups.CHECKS,
    *step_plans.CHECKS,
    *accuracy.CHECKS,
    *latent.CHECKS,
    *packed_latents.CHECKS,
    *unused_memory.CHECKS,
    *null_blocks.CHECKS,
    *empty_batches.CHECKS,
    *cache_write.CHECKS,
    *page_formats.CHECKS,
    *strides.CHECKS,
    *cache_exchange.CHECKS,
    *kv_sharing.CHECKS,
    *rotary_write.CHECKS,
    *lse.CHECKS,
    *addressing.CHECKS,
    *determinism.CHECKS,
    *unsupported.CHECKS,
    *cuda_graphs.CHECKS,
    *host_overhead.CHECKS,
    *process_isolation.CHECKS,
)
