"""How the results of a list and up to 16 query heads are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.latent_columns import COLUMNS
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_memory import QUARTERS
from attnlib.ops.triton.hopper.kernels.softmax import LN2

__all__ = ["store_list"]


@gluon.jit
def store_list(results, acc, normalizer, base2, head, work, memory, CONFIG: gl.constexpr):
    """Write the results of a list.

    Args:
        acc: accumulators of the quarters.
        normalizer: [1, 16], factors of the accumulators.
        base2: [16], base-2 LSEs.
        head: [16].
    """
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    split = gl.program_id(1)
    exists = work.visible.exists
    token64 = work.token.to(gl.int64)
    place = token64 * results.num_heads * results.num_splits + split
    if CONFIG.SPLIT:
        lses = results.partial_lses()
        gl.store(lses + place + head * results.num_splits, base2, mask=head < CONFIG.HEADS)
        results.store_num_splits(work.token, exists)
        for quarter in gl.static_range(QUARTERS):
            _store_partial(results, acc[quarter] * normalizer, place, quarter * WIDTH)
    if not CONFIG.SPLIT or (split == 0 and not exists):
        for quarter in gl.static_range(QUARTERS):
            result = acc[quarter] * normalizer
            staging = memory.queries.index(quarter)
            offset = token64 * results.outputs.stride_token
            _store_rows(results, result, staging, offset, quarter * WIDTH)
        if CONFIG.HAS_LSE:
            pointers = results.outputs.lse + token64 * results.outputs.stride_lse + head
            gl.store(pointers, base2 * LN2, mask=head < CONFIG.HEADS)


@gluon.jit
def _store_rows(results, result, staging, offset, START: gl.constexpr):
    """Write elements START and following of all heads to the output, through `staging`.

    Args:
        result: [elements, 16].
        offset: element offset of the first head in the output.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    target = staging.slice(0, 16, 0)
    target.store(gl.permute(result, (1, 0)).to(target.dtype))
    partition_barrier()
    head = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    lanes = START + gl.arange(0, result.shape[0], gl.SliceLayout(0, LAYOUT))
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    offsets = ((offset + head.to(gl.int64) * results.outputs.stride_head) >> 3) << 3
    mask = (head < results.HEADS)[:, None] & (lanes >= 0)[None, :]
    pointers = results.outputs.pointer + offsets[:, None] + lanes[None, :]
    gl.store(pointers, target.load(LAYOUT), mask=mask)


@gluon.jit
def _store_partial(results, result, place, START: gl.constexpr):
    """Write elements START and following of all heads of a partial result in float32.

    Args:
        result: [elements, 16].
        place: row of the first head in the partial results.
    """
    lanes = START + gl.arange(0, result.shape[0], gl.SliceLayout(1, COLUMNS))
    head = gl.arange(0, 16, gl.SliceLayout(0, COLUMNS))
    places = (place + head.to(gl.int64) * results.num_splits) * results.DV
    mask = (head < results.HEADS)[None, :] & (lanes >= 0)[:, None]
    pointers = results.partials + places[None, :] + lanes[:, None]
    gl.store(pointers, result, mask=mask)
