"""How the results of a list and up to 64 query heads are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.latent_tiles import LOW
from attnlib.ops.triton.hopper.kernels.softmax import LN2

__all__ = ["store_half"]


@gluon.jit
def store_half(
    results, result, base2, head, valid, work, tiles, CONFIG: gl.constexpr, CONSUMER: gl.constexpr
):
    """Write one half of the results, and consumer 0 the LSEs.

    Args:
        result: [64, DV / 2].
        base2: [64], base-2 LSEs.
        head, valid: [64], the heads of the rows and whether they exist.
    """
    token64 = work.token.to(gl.int64)
    if CONFIG.SPLIT:
        if CONSUMER == 0:
            lses = results.partial_lses()
            place = (token64 * results.num_heads + head) * results.num_splits + work.split
            gl.store(lses + place, base2, mask=valid)
            results.store_num_splits(work.token, work.exists)
        first = token64 * results.num_heads + work.head_offset
        _store_partial(results, result, first * results.num_splits + work.split, CONSUMER)
    if not CONFIG.SPLIT or (work.split == 0 and not work.exists):
        # No product reads this buffer any more.
        staging = tiles.latents.part(LOW + CONSUMER).index(0)
        offset = (
            token64 * results.outputs.stride_token
            + work.head_offset.to(gl.int64) * results.outputs.stride_head
        )
        _store_rows(results, result, offset, staging, CONSUMER)
        if CONFIG.HAS_LSE:
            if CONSUMER == 0:
                pointers = results.outputs.lse + token64 * results.outputs.stride_lse + head
                gl.store(pointers, base2 * LN2, mask=valid)


@gluon.jit
def _store_rows(results, result, offset, staging, CONSUMER: gl.constexpr):
    """Write one half of the results to the output, through `staging` [64, HALF] in shared memory.

    Args:
        offset: element offset of the first row in the output.
    """
    HALF: gl.constexpr = result.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    partition_barrier()
    staging.store(result.to(staging.dtype))
    partition_barrier()
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lanes = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    offsets = ((offset + row.to(gl.int64) * results.outputs.stride_head) >> 3) << 3
    mask = (row < results.HEADS)[:, None] & (lanes >= 0)[None, :]
    pointers = results.outputs.pointer + offsets[:, None] + lanes[None, :]
    gl.store(pointers, staging.load(LAYOUT), mask=mask)


@gluon.jit
def _store_partial(results, result, place, CONSUMER: gl.constexpr):
    """Write one half of a partial result in float32.

    Args:
        place: row of the first head in the partial results.
    """
    HALF: gl.constexpr = result.shape[1]
    LAYOUT: gl.constexpr = result.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lanes = CONSUMER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    places = (place + row.to(gl.int64) * results.num_splits) * results.DV
    mask = (row < results.HEADS)[:, None] & (lanes >= 0)[None, :]
    pointers = results.partials + places[:, None] + lanes[None, :]
    gl.store(pointers, result, mask=mask)
