"""The table: the rows of all seeds."""

from __future__ import annotations

from tests.compat.seeds import attention_api, minivllm, paged_ops, triton_prefill, v1_utils
from tests.compat.seeds.table import Row, Seed

__all__ = ["ROWS", "SEEDS"]

SEEDS: tuple[Seed, ...] = (
    minivllm.SEED,
    attention_api.SEED,
    paged_ops.SEED,
    v1_utils.SEED,
    triton_prefill.SEED,
)

ROWS: tuple[Row, ...] = tuple(row for seed in SEEDS for row in seed.rows)
