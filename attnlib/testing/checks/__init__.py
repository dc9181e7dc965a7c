"""The checks of the conformance suite, one module for each group of requirements.

The id of a check is the id of the requirement that it covers. `CHECKS` is sorted from specific to
general: the first failing check names the cause best, and reports show it first. A check whose
message names the error (which keys, which head, which base) comes before one that only compares
numbers with the oracle, and one over a single feature comes before one over all of them.
"""

from __future__ import annotations

from attnlib.testing.check import Check
from attnlib.testing.checks import (
    accuracy,
    addressing,
    cache_exchange,
    cache_operations,
    cache_write,
    compressed_entries,
    cuda_graphs,
    determinism,
    empty_batches,
    float8_queries,
    host_overhead,
    key_indexer,
    key_selection,
    key_weights,
    kv_heads,
    kv_sharing,
    latent,
    layer_groups,
    lse,
    merged_states,
    null_blocks,
    operations,
    packed_caches,
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
    *kv_heads.CHECKS,
    *key_weights.CHECKS,
    *lse.CHECKS,
    *merged_states.CHECKS,
    *empty_batches.CHECKS,
    *cache_write.CHECKS,
    *cache_operations.CHECKS,
    *parameters.CHECKS,
    *score_functions.CHECKS,
    *key_selection.CHECKS,
    *key_indexer.CHECKS,
    *compressed_entries.CHECKS,
    *float8_queries.CHECKS,
    *latent.CHECKS,
    *packed_latents.CHECKS,
    *operations.CHECKS,
    *packed_caches.CHECKS,
    *rotary_write.CHECKS,
    *page_formats.CHECKS,
    *unused_memory.CHECKS,
    *null_blocks.CHECKS,
    *strides.CHECKS,
    *layer_groups.CHECKS,
    *step_plans.CHECKS,
    *kv_sharing.CHECKS,
    *unsupported.CHECKS,
    *determinism.CHECKS,
    *accuracy.CHECKS,
    *addressing.CHECKS,
    *cache_exchange.CHECKS,
    *cuda_graphs.CHECKS,
    *host_overhead.CHECKS,
    *process_isolation.CHECKS,
)
