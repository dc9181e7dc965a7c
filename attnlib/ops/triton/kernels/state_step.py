"""The recurrence over slots in the tail form (T9), one program per request, head and value rows.

A slot holds the state at `base`, the multiple of C at or before its position `low`, and in a ring
the inputs of the tokens since then. A step computes the chunks from `base` on, each with one shape,
whether its rows are new or from the ring, and moves `low` to max(n, end - D). Rows of a tail are
never moved, so that programs of several heads may read the same keys while one of them writes those
of new tokens: the ring's C + 2 (D + 1) rows hold both for steps of up to D + 1 tokens. Longer steps
run in three launches, see `state_prefill`. The arithmetic is in `state_chunk`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels import state_arguments as arguments
from attnlib.ops.triton.kernels.state_program import compute_request, load_first
from attnlib.ops.triton.kernels.state_requests import load_base, open_request
from attnlib.ops.triton.kernels.state_rows import clear_tokens

__all__ = ["state_step_kernel"]


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=arguments.UNALIGNED
)
def state_step_kernel(
    q, k, v, decay, beta, skip, out, state, positions, tail_k, tail_v, tail_decay, tail_beta,
    query_start_loc, seq_lens, slots, sources, workspace, scale, num_reqs, num_tokens,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute a step of one request for ROWS * PASSES value rows of one state head.

    CONFIG is a `StateConfig`. Grid: (requests + 1, HV * BLOCKS). The last programs clear the rows
    after the last request.
    """
    number = tl.program_id(0)
    head, block = tl.program_id(1) // CONFIG.BLOCKS, tl.program_id(1) % CONFIG.BLOCKS
    if number == num_reqs:
        first = tl.load(query_start_loc + num_reqs)
        clear_tokens(out, first, num_tokens, head, block, CONFIG)
        return
    request = open_request(arguments.StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if request.slot < 0:
        clear_tokens(out, request.first, request.first + request.count, head, block, CONFIG)
        return
    if request.count <= 0:
        return
    slots_of = arguments.Slots(
        state, positions, arguments.Tail(tail_k, tail_v, tail_decay, tail_beta)
    )
    base = load_base(positions, request, head, block, CONFIG)
    tokens = arguments.Tokens(q, k, v, decay, beta)
    s = load_first(request, base, tokens, slots_of, False, CONFIG)
    results = arguments.Results(skip, out, workspace, scale)
    compute_request(request, number, base, s, tokens, slots_of, results, False, CONFIG)
