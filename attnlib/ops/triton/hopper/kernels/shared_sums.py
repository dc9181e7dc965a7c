"""What the consumers of the decode of shared prefixes accumulate, and its exchange between them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from attnlib.ops.shared_decode import PRODUCT_ROWS
from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, exp2, partition_barrier

__all__ = [
    "ROWS",
    "Exchange",
    "RowSums",
    "allocate_exchange",
]


ROWS = gl.constexpr(PRODUCT_ROWS)
"""Query rows of a consumer."""


@aggregate
class RowSums:
    """Maxima, sums of weights and sums of values [ROWS, width] of the query rows of a consumer."""

    row_max: Value
    row_sum: Value
    acc: Value


@aggregate
class Exchange:
    """Memory through which the second consumer gives its `RowSums` to the first one, with mbarriers
    of one arrival. `number` counts how often it has done so."""

    acc: Value
    row_max: Value
    row_sum: Value
    full: Value
    empty: Value

    @gluon.jit
    def give(self, sums, number):
        """Give the sums of the second consumer to the first one."""
        mbarrier.wait(self.empty, (number & 1) ^ 1)
        self.acc.store(sums.acc)
        self.row_max.store(sums.row_max)
        self.row_sum.store(sums.row_sum)
        partition_barrier()
        mbarrier.arrive(self.full, count=1)

    @gluon.jit
    def add(self, sums, number):
        """Return the sums of the first consumer plus those that the second one has given."""
        LAYOUT: gl.constexpr = sums.acc.type.layout
        row_max = sums.row_max
        mbarrier.wait(self.full, number & 1)
        other_max = self.row_max.load(row_max.type.layout)
        other_sum = self.row_sum.load(row_max.type.layout)
        new_max = gl.maximum(row_max, other_max)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        keep = exp2(row_max - finite_max)
        other_keep = exp2(other_max - finite_max)
        acc = sums.acc * gl.convert_layout(keep, gl.SliceLayout(1, LAYOUT))[:, None]
        # Accumulators of rows without keys are 0.
        other = self.acc.load(LAYOUT)
        acc += other * gl.convert_layout(other_keep, gl.SliceLayout(1, LAYOUT))[:, None]
        row_sum = sums.row_sum * keep + other_sum * other_keep
        partition_barrier()
        mbarrier.arrive(self.empty, count=1)
        return RowSums(new_max, row_sum, acc)


@gluon.jit
def allocate_exchange(WIDTH: gl.constexpr):
    """Return an `Exchange` of outputs with WIDTH elements."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.float32)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    acc = gl.allocate_shared_memory(gl.float32, [ROWS, WIDTH], MATRIX)
    row_max = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    row_sum = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    return Exchange(acc, row_max, row_sum, full, empty)
