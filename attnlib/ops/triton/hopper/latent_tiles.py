"""Tiles of the decodes over latents: rows and workers of a CTA, stages of its rings, registers."""

from __future__ import annotations

from typing import NamedTuple

from attnlib.ops.triton.hopper.sizes import LATENT_ROWS

__all__ = [
    "COLUMNS_32",
    "CONVERTED",
    "CONVERTED_COLUMNS",
    "FEW_KEYS",
    "FEW_PACKED_KEYS",
    "HALVED",
    "ONE_WORKER",
    "ROWS_FIRST",
    "SAME_LATENTS",
    "TWO_WORKERS",
    "LatentTile",
    "choose_latent_tile",
]

_SWAPPED_ROWS = 16
"""Query rows of the smaller tile over a 16-bit cache; `COLUMNS_32` serves up to 32."""
_WORKER_ROWS = 32
"""Query rows of a worker over an 8-bit cache, at most: its accumulators are half of the registers.
"""


class LatentTile(NamedTuple):
    """The tile of a decode over latents.

    Attributes:
        rows: query rows of a worker.
        swaps: latents are the rows of the products.
        workers: consumer warpgroups of a CTA, where latents are the rows of the products.
        shares: its workers have the same latents, with `rows` of the CTA's query rows each.
        stages, rotary_stages: quarters of tiles in a ring, and their other elements.
        in_flight: quarters of a ring in flight, at most.
        converts: four warps convert the latents of an 8-bit cache in shared memory; `in_flight`
            is 0 without prefetches.
        halved: they convert to float16, also for bfloat16 queries, if there is one scale.
        registers: of a thread at the launch; None means Triton's choice.
        consumer_registers, loader_registers: of a thread of the second consumer, and of a loader.
    """

    rows: int
    swaps: bool
    workers: int = 1
    shares: bool = False
    stages: int = 11
    rotary_stages: int = 3
    in_flight: int = 4
    converts: bool = False
    halved: bool = False
    registers: int | None = None
    consumer_registers: int = 224
    loader_registers: int = 40

    @property
    def ranges(self) -> int:
        """Ranges of a CTA."""
        return 1 if self.shares else self.workers


_SWAPPED = LatentTile(_SWAPPED_ROWS, True, registers=128, loader_registers=32)
"""The first consumer gets the registers that the others leave. With 168 instead of 128, 64 requests
of 16k latents take 282.5 us instead of 281.2 on an H200."""
COLUMNS_32 = LatentTile(32, True, stages=10, registers=168)
"""Tile of up to 32 query rows, as the columns of the products. On an H200, 32 heads, in us, and
with `ROWS_FIRST`: 1 x 8k 14.6 and 15.8, 32 x 4k 53.5 and 54.1, 128 x 2k 86.9 and 93.1."""
ROWS_FIRST = LatentTile(LATENT_ROWS, False)
CONVERTED = ROWS_FIRST._replace(
    converts=True, registers=168, consumer_registers=208, loader_registers=88
)
"""Tile of more than 32 query rows over packed latents, which four warps convert. With 216 and 72
registers, 64 heads and 64 x 8k take 251 us instead of 199."""
HALVED = CONVERTED._replace(halved=True)
"""The same over 8-bit caches with one scale, with products in float16, in which two elements are
converted by one instruction instead of four (`kernels/latent_halves.py`). On an H200, converted to
bfloat16 and to float16, in us: 64 heads and 64 x 8k 190.3 and 182.7, 128 heads and 128 x 4k 357.4
and 343.0; largest error 0.0031 and 0.0020, 0.0037 and 0.0019."""
CONVERTED_COLUMNS = _SWAPPED._replace(
    converts=True, in_flight=1, registers=224, loader_registers=208
)
"""`CONVERTED` for up to 16 query rows, as the columns of the products."""
_TWO = LatentTile(
    16, True, workers=2, rotary_stages=2, registers=168, consumer_registers=232, loader_registers=40
)
"""Two workers over 8-bit caches. A CTA has three warpgroups, of which the third has the loaders:
232 + 232 + 40 is three times 168."""
TWO_WORKERS = _TWO._replace(stages=10, in_flight=3)
ONE_WORKER = LatentTile(_SWAPPED_ROWS, True, stages=20, in_flight=8, registers=128)
SAME_LATENTS = _TWO._replace(shares=True, stages=20, in_flight=8)
"""Tiles over 8-bit caches with one scale: up to 16 rows of many and of few latents, 32 rows. On an
H200 (benchmarks/results/h200/latent_tiles.json), us with two workers and with one: 16 heads 1 x 8k
14.7 and 11.5, 32 x 1k 21.8 and 17.3, 32 x 4k 41.5 and 39.0, 64 x 16k 169 and 233; with 4 and 6
quarters in flight instead of 3, 179 and 181 (at e2175fa5). 32 heads, two workers of 32 rows and the
same latents: 1 x 8k 23.6 and 15.4, 32 x 4k 64.2 and 54.7, 128 x 2k 87.8 and 87.4."""
_GROUPS_16 = _TWO._replace(stages=8)
_GROUPS_32 = _TWO._replace(shares=True, stages=14, rotary_stages=3, in_flight=8)
"""The same with a scale for each quarter of a latent."""
FEW_KEYS, FEW_PACKED_KEYS = 1024, 256
"""Latents that a multiprocessor reads, at most, for which ranges are short: with one scale, and
with a scale for each quarter. 16 heads, packed, us with `CONVERTED_COLUMNS` and with two workers:
1 x 8k 12.6 and 16.7, 32 x 1k 22.4 and 25.6, 32 x 4k 58.4 and 47.9."""


def choose_latent_tile(
    rows: int,
    blocks: int,
    is_quantized: bool = False,
    group_scales: bool = False,
    keys_per_sm: int | None = None,
) -> LatentTile:
    """The tile of a decode.

    Args:
        rows: query rows of a block, at most 64.
        blocks: of query rows of a request.
        is_quantized: elements of the values have 8 bits.
        group_scales: each quarter of a latent has a scale, and the other elements are bfloat16.
        keys_per_sm: `tile_table.work_class` of the batch; None if the tile must not depend on it.
    """
    if blocks > 1 or rows > _WORKER_ROWS:
        if not is_quantized:
            return ROWS_FIRST
        return CONVERTED if group_scales else HALVED
    if not is_quantized:
        return _SWAPPED if rows <= _SWAPPED_ROWS else COLUMNS_32
    if rows > _SWAPPED_ROWS:
        return _GROUPS_32 if group_scales else SAME_LATENTS
    few = FEW_PACKED_KEYS if group_scales else FEW_KEYS
    if keys_per_sm is not None and keys_per_sm <= few:
        return CONVERTED_COLUMNS if group_scales else ONE_WORKER
    return _GROUPS_16 if group_scales else TWO_WORKERS
