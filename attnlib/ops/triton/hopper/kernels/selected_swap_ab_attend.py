"""How four warps attend to a list with up to 16 query heads, and normalize the results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, partition_barrier
from attnlib.ops.triton.hopper.kernels.latent_columns import COLUMNS, LATENTS
from attnlib.ops.triton.hopper.kernels.logits import logits_of
from attnlib.ops.triton.hopper.kernels.selected_lists import Slots, count_slots
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_memory import NUMBER
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_store import store_list
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_tiles import attend_to_tiles
from attnlib.ops.triton.hopper.kernels.softmax import add_sink

__all__ = ["attend_to_list"]

LARGEST_SUM: gl.constexpr = gl.constexpr(2.0**40)
"""Sum of the weights of a row above which its list is left to the second launch. A sum of weights
times values overflows only with values above 2^87."""
LARGEST_SUM_FLOAT16: gl.constexpr = gl.constexpr(2.0**15)
"""The same for weights in float16, which must stay below 65504."""


@aggregate
class _Work:
    """The list of a token.

    Fields:
        token: the query token.
        list: its `Slots`, up to the last one with a visible position.
        visible: the `VisibleKeys` of the token.
        has_holes: whether slots before the end of the list select nothing.
        tiles: tiles of latents, at least one.
    """

    token: Value
    list: Value
    visible: Value
    has_holes: Value
    tiles: Value


@gluon.jit
def _work_of(lists, token, RUNNING: gl.constexpr):
    """Return the `_Work` of a token."""
    slots = lists.slots(token, gl.program_id(1), LATENTS)
    visible = lists.visible_keys(token)
    used, has_holes = count_slots(slots.entries, lists.num_entries, visible, lists.SELECT)
    end = gl.minimum(slots.end, used)
    # A CTA without keys masks one tile of zeros. The first tile is copied in any case.
    tiles = gl.maximum(gl.maximum(end - slots.begin + LATENTS - 1, 0) // LATENTS, 1)
    if not RUNNING:
        tiles = gl.where(has_holes, 1, tiles)
    used_slots = Slots(slots.entries, slots.begin, end, lists.SELECT)
    return _Work(token, used_slots, visible, has_holes, tiles)


@gluon.jit
def _divisor(row_sum, work, memory, number, RUNNING: gl.constexpr):
    """Return the numbers by which outputs are divided: the sums of the weights with RUNNING, else
    of the rounded weights, and NaN for lists that are left to the second launch.

    Args:
        number: lists that the CTA has attended to before.
    """
    divisor = row_sum
    if not RUNNING:
        IS_FLOAT16: gl.constexpr = memory.ring.dtype == gl.float16
        LARGEST: gl.constexpr = LARGEST_SUM_FLOAT16 if IS_FLOAT16 else LARGEST_SUM
        mbarrier.wait(memory.summed.index(0), number & 1)
        divisor = memory.rounded_sums.load(row_sum.type.layout)
        divisor = gl.where((divisor <= LARGEST) & (work.has_holes == 0), divisor, float("nan"))
    return divisor


@gluon.jit
def attend_to_list(
    results, lists, memory, scale, soft_cap, token, number, done, CONFIG: gl.constexpr
):
    """Compute and write the results of a list; returns the number of tiles.

    Args:
        results: the `SelectedResults`.
        lists: the `KeyLists`.
        number, done: lists and tiles that the CTA has attended to before.
        CONFIG: the `SelectedConfig`.
    """
    work = _work_of(lists, token, CONFIG.RUNNING)
    memory.num_tiles.store(gl.full([1], 0, gl.int32, NUMBER) + work.tiles)
    mbarrier.arrive(memory.listed.index(0), count=1)
    mbarrier.wait(memory.queries_full.index(0), number & 1)
    fence_async_shared()
    logits = logits_of(scale, soft_cap, CONFIG.HAS_CAP)
    row_max, sums, acc = attend_to_tiles(work, memory, logits, done, CONFIG.RUNNING, CONFIG.HAS_LSE)
    # The sum of the LSE, and that by which the output is divided.
    row_sum = gl.sum(sums, 0)
    divisor = _divisor(row_sum, work, memory, number, CONFIG.RUNNING)
    # All warps are done with the queries, whose memory holds the output from now on.
    partition_barrier()

    ROW: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    head = gl.arange(0, 16, ROW)
    valid = head < CONFIG.HEADS
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    out_scale = gl.full([16], 1.0, gl.float32, ROW)
    if CONFIG.HAS_SINK:
        if not CONFIG.SPLIT:
            # Otherwise the sink counts when the splits are combined (M4). Rows after the last
            # request see none.
            seen = valid & work.visible.exists
            sink = gl.load(results.outputs.sinks + head, mask=seen, other=float("-inf"))
            _, _, divisor = add_sink(row_max, divisor, sink)
            finite_max, out_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty = divisor == 0.0
    base2 = finite_max + gl.log2(gl.where(empty, 1.0, row_sum))
    base2 = gl.where(empty, float("-inf"), base2)
    normalizer = (out_scale / gl.where(empty, 1.0, divisor))[None, :]
    store_list(results, acc, normalizer, base2, head, work, memory, CONFIG)
    partition_barrier()
    mbarrier.arrive(memory.queries_empty.index(0), count=1)
    return work.tiles
