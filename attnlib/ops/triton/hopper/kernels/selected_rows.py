"""Rows of queries and latents that Hopper kernels over lists gather, and rows that they write."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, copy_to_shared

__all__ = ["SelectedInputs", "SelectedResults", "gather_part"]


@gluon.jit
def gather_part(base, offsets, exists, target, START: gl.constexpr):
    """Issue the copies of elements START and following of some rows; rows that do not exist become
    0.

    Args:
        base: pointer to the elements.
        offsets: [rows] element offsets of the rows, multiples of 8.
        exists: [rows].
        target: [rows, WIDTH] in shared memory.
    """
    LAYOUT: gl.constexpr = offsets.type.layout.parent
    # The shifts tell the compiler about the alignment, which the launcher checks.
    starts = base + ((offsets >> 3) << 3)
    lanes = START + gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    mask = exists[:, None] & (lanes >= 0)[None, :]
    copy_to_shared(target, starts[:, None] + lanes[None, :], mask=mask)


@aggregate
class SelectedInputs:
    """The queries of a call and its cache of latents.

    Fields:
        query, key: pointers.
        stride_qt, stride_qh: elements from token to token and from head to head.
        stride_kb, stride_kn: elements from block to block and from position to position.
        BLOCK_SIZE: positions of a block.
    """

    query: Value
    key: Value
    stride_qt: Value
    stride_qh: Value
    stride_kb: Value
    stride_kn: Value
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def query_offsets(self, token, heads):
        """Return the element offsets of the heads of a token."""
        return token.to(gl.int64) * self.stride_qt + heads.to(gl.int64) * self.stride_qh

    @gluon.jit
    def blocks(self, position, visible):
        """Return the blocks of positions; 0 for -1."""
        return gl.load(
            visible.table + gl.maximum(position, 0) // self.BLOCK_SIZE, mask=position >= 0, other=0
        )

    @gluon.jit
    def latent_offsets(self, position, block):
        """Return the element offsets of the latents of positions in known blocks."""
        offsets = block.to(gl.int64) * self.stride_kb
        offsets += (gl.maximum(position, 0) % self.BLOCK_SIZE).to(gl.int64) * self.stride_kn
        return offsets


@aggregate
class SelectedResults:
    """Where results are written.

    Fields:
        outputs: the `Outputs`.
        partials: pointer to float32 partial results, not used without SPLIT: outputs
            [tokens, heads, splits, DV], base-2 LSEs [tokens, heads, splits], numbers of splits
            [tokens].
        num_tokens, num_heads, num_splits: sizes of the partial results.
        HEADS: query heads of a CTA.
        DV: elements of a value.
    """

    outputs: Value
    partials: Value
    num_tokens: Value
    num_heads: Value
    num_splits: Value
    HEADS: gl.constexpr
    DV: gl.constexpr

    @gluon.jit
    def partial_lses(self):
        """Return the pointer to the base-2 LSEs of the partial results."""
        rows = self.num_tokens.to(gl.int64) * self.num_heads
        return self.partials + rows * self.num_splits * self.DV

    @gluon.jit
    def store_num_splits(self, token, exists):
        """Write how many splits a token has; rows after the last request have none: the combine
        kernel leaves them alone."""
        rows = self.num_tokens.to(gl.int64) * self.num_heads
        counts = self.partial_lses() + rows * self.num_splits + token.to(gl.int64)
        gl.store(counts, gl.where(exists, self.num_splits, 0).to(gl.float32))
