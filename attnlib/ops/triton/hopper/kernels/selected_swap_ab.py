"""The Hopper kernel over selected latents for up to 16 query heads (M11, M12).

WGMMA multiplies at least 64 rows, so with few heads the latents are the rows of both products and
the heads their columns (`latent_columns`).

A CTA attends to the list of one query token, or to a split of it. Four warps gather tiles of
latents by `cp.async`, in quarters, and four warps multiply them. Two CTAs of an SM overlap the
gathers of one with the products of the other.

Many lists take two launches. In the first, weights are relative to the maxima of the first tile and
not to running maxima: the warps that multiply then exchange no maxima for the other tiles, and
nothing is rescaled. The largest weight of a row is no longer 1, and is rounded. Outputs are
therefore divided by the sum of the rounded weights: the error of a weight that outweighs the others
cancels. The warps that gather add them up.

Where the scores rise so far above the maxima of the first tile that a sum of weights becomes too
large, and where entries that select nothing come before others, the output becomes NaN. The second
launch attends to the lists with such outputs, with running maxima.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.decode_call import Outputs
from attnlib.ops.triton.hopper.kernels.schedule import Batch, Mask
from attnlib.ops.triton.hopper.kernels.selected_lists import UNALIGNED, UNSPECIALIZED, KeyLists
from attnlib.ops.triton.hopper.kernels.selected_rows import SelectedInputs, SelectedResults
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_attend import attend_to_list
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_gather import gather_list
from attnlib.ops.triton.hopper.kernels.selected_swap_ab_memory import BACK, allocate_memory

__all__ = ["hopper_selected_swap_ab_kernel"]


@gluon.jit
def _holds_nan(results, token):
    """Whether the first element of an output of a token is NaN."""
    head = gl.arange(0, 16, gl.BlockedLayout([1], [32], [4], [0]))
    first = gl.load(
        results.outputs.pointer
        + token.to(gl.int64) * results.outputs.stride_token
        + head.to(gl.int64) * results.outputs.stride_head,
        mask=head < results.HEADS,
        other=0.0,
    ).to(gl.float32)
    return gl.max((first != first).to(gl.int32), 0) != 0


@gluon.jit
def _any_holds_nan(results):
    """Whether the first element of an output of any token of the CTA is NaN."""
    TOKENS: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    heads = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    found = gl.zeros([TOKENS, 16], gl.int32, LAYOUT)
    for base in range(gl.program_id(0), results.num_tokens, TOKENS * gl.num_programs(0)):
        tokens = base + gl.num_programs(0) * gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
        offsets = (
            tokens.to(gl.int64)[:, None] * results.outputs.stride_token
            + heads.to(gl.int64)[None, :] * results.outputs.stride_head
        )
        mask = (tokens < results.num_tokens)[:, None] & (heads < results.HEADS)[None, :]
        first = gl.load(results.outputs.pointer + offsets, mask=mask, other=0.0).to(gl.float32)
        found |= (first != first).to(gl.int32)
    return gl.max(gl.max(found, 1), 0) != 0


@gluon.jit
def _tokens(repeated_tokens, REPEAT: gl.constexpr):
    """Return (end, step) of the CTA's tokens from its number on."""
    if REPEAT:
        return repeated_tokens, gl.num_programs(0)
    else:
        return gl.program_id(0) + 1, 1


@gluon.jit
def _gatherer(inputs, lists, results, memory, repeated_tokens, CONFIG: gl.constexpr):
    """Copy the queries and all tiles of the CTA's lists into shared memory. Four warps."""
    number = 0
    done = 0
    token_end, step = _tokens(repeated_tokens, CONFIG.REPEAT)
    for token in range(gl.program_id(0), token_end, step):
        if not CONFIG.REPEAT or _holds_nan(results, token):
            # The list before has released all slots.
            mbarrier.wait(memory.empty.index(BACK), (done & 1) ^ 1)
            done += gather_list(
                inputs, lists, memory, token, number, done, CONFIG.HEADS, CONFIG.RUNNING
            )
            number += 1


@gluon.jit
def _consumer(results, lists, memory, scale, soft_cap, repeated_tokens, CONFIG: gl.constexpr):
    """Compute and write the results of the CTA's lists. Four warps."""
    number = 0
    done = 0
    token_end, step = _tokens(repeated_tokens, CONFIG.REPEAT)
    for token in range(gl.program_id(0), token_end, step):
        if not CONFIG.REPEAT or _holds_nan(results, token):
            done += attend_to_list(
                results, lists, memory, scale, soft_cap, token, number, done, CONFIG
            )
            number += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_selected_swap_ab_kernel(
    query, key, out, partials, query_start_loc, seq_lens, block_table, indices, sinks, lse, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
    stride_lt, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 8 warps. Grid: (tokens, splits), or with REPEAT (any number, 1).

    Args:
        partials: float32 partial results, see `SelectedResults`.
        indices: the lists, [tokens, ..., entries].
        num_entries: entries of a list.
        num_splits: splits of each list.
        CONFIG: a `SelectedConfig` with at most 16 HEADS and one of HEAD_BLOCKS.
    """
    memory = allocate_memory(CONFIG.DV, CONFIG.ROTARY, query.dtype.element_ty)
    fence_async_shared()
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, None, stride_table)
    lists = KeyLists(
        batch, mask, indices, num_entries, num_splits, stride_lists, CONFIG.SELECT, CONFIG.SPLIT
    )
    inputs = SelectedInputs(
        query, key, stride_qt, stride_qh, stride_kb, stride_kn, CONFIG.BLOCK_SIZE
    )
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    results = SelectedResults(
        outputs, partials, num_tokens, num_heads, num_splits, CONFIG.HEADS, CONFIG.DV
    )
    repeated_tokens = 0
    if CONFIG.REPEAT:
        repeated_tokens = gl.where(_any_holds_nan(results), num_tokens, 0)
    gl.warp_specialize(
        [
            (
                _consumer,
                (results, lists, memory, scale, soft_cap, repeated_tokens, CONFIG),
            ),
            (_gatherer, (inputs, lists, results, memory, repeated_tokens, CONFIG)),
        ],
        [4],
        [CONFIG.REGISTERS],
    )
