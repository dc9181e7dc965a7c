"""Attention of up to 16 query rows over one tile of latents, with the latents as the rows of the
products (P10).

WGMMA multiplies at least 64 rows. With few query heads the operands of both products are swapped
("swap AB"): scores are [latents, query rows] and accumulators [elements of a value, query rows],
and no row of a product is padding. Accumulators take 64 registers of each thread.

Addresses of tiles should contain a value that the compiler does not see (`opaque_zero`): it would
otherwise compute the descriptors of all products before the loop.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

__all__ = [
    "COLUMNS",
    "LATENTS",
    "load_values",
    "multiply_keys",
    "multiply_loaded_values",
    "multiply_values",
]

COLUMNS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
"""Layout of [latents, query rows] and [elements of a value, query rows]."""
LATENTS: gl.constexpr = gl.constexpr(64)
"""Latents of a tile: the M of a WGMMA."""


@gluon.jit
def multiply_keys(scores, latents, queries, USE_ACC: gl.constexpr):
    """Issue scores + K @ Q^T for some of the elements.

    Args:
        scores: [64, 16].
        latents, queries: [64, elements] and [16, elements] in shared memory.
    """
    return warpgroup_mma(latents, queries.permute((1, 0)), scores, use_acc=USE_ACC, is_async=True)


@gluon.jit
def multiply_values(acc, latents, weights):
    """Issue acc + V^T @ P^T for some of the elements.

    Args:
        acc: [elements, 16].
        latents: [64, elements] in shared memory.
        weights: [16, 64] in shared memory.
    """
    return warpgroup_mma(latents.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)


@gluon.jit
def load_values(latents):
    """Load some of the elements, [64, elements], for `multiply_loaded_values`."""
    return latents.permute((1, 0)).load(gl.DotOperandLayout(0, COLUMNS, 2))


@gluon.jit
def multiply_loaded_values(acc, values, weights):
    """`multiply_values` with the result of `load_values`."""
    return warpgroup_mma(values, weights.permute((1, 0)), acc, is_async=True)
