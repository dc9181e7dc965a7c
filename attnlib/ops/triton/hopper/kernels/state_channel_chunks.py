"""Chunks of long steps with decays per channel (`state_long`), of layers whose bits may depend on
steps: later tokens change how earlier ones are computed, which T18 forbids. Chunks have 32 tokens,
and keys 64 or 128 channels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels import state_blocks as blocks
from attnlib.ops.triton.hopper.kernels import state_pieces as pieces
from attnlib.ops.triton.hopper.kernels.state_halves import channel_products, row_layout
from attnlib.ops.triton.hopper.kernels.state_long import factor_size, plane_size
from attnlib.ops.triton.kernels import state_requests as requests
from attnlib.ops.triton.kernels.schedule import find_request
from attnlib.ops.triton.kernels.state_arguments import UNALIGNED, StateBatch, Tail, Tokens

__all__ = ["channel_matrices_kernel"]

_SQUARES: gl.constexpr = gl.constexpr(
    "{.reg .f32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, -65536;"
    " mul.f32 $0, a, a; mul.f32 $1, b, b;}"
)
"""Of two numbers of bfloat16 in a register, without other registers for them in float32."""


@gluon.jit
def _load_rows(part, old, new, OLD, NEW, LAYOUT, IS_NEW: gl.constexpr, CONFIG: gl.constexpr):
    """Return rows of a chunk, [C, PART], 0 where there is no token. With IS_NEW, all are in the
    step. OLD and NEW are the strides of rows."""
    row = gl.arange(0, CONFIG.C, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, LAYOUT))
    if IS_NEW:
        rows = gl.load(new + part.token * NEW + (row * NEW)[:, None] + column[None, :])
    else:
        place, exists = pieces.token_places(part, row, column, old, new, OLD, NEW, CONFIG)
        rows = gl.load(place, mask=exists, other=0.0)
    return rows


@gluon.jit
def _load_chunk(part, tokens, tail, IS_NEW: gl.constexpr, CONFIG: gl.constexpr):
    """Return queries, keys and decays; any queries for tokens in the tail, whose outputs nobody
    stores."""
    ROWS: gl.constexpr = row_layout(CONFIG.C, CONFIG.PART)
    SUMS: gl.constexpr = gl.BlockedLayout([CONFIG.C, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    OLD: gl.constexpr = CONFIG.HK * CONFIG.DK
    OLD_G: gl.constexpr = CONFIG.HV * CONFIG.DK
    old, new = tail.decay, tokens.decay
    k = _load_rows(part, tail.k, tokens.k, OLD, CONFIG.K_T, ROWS, IS_NEW, CONFIG)
    q = _load_rows(part, tokens.q, tokens.q, 0, CONFIG.Q_T, ROWS, IS_NEW, CONFIG)
    return q, k, _load_rows(part, old, new, OLD_G, CONFIG.G_T, SUMS, IS_NEW, CONFIG)


@gluon.jit
def _inverse_lengths(x, CONFIG: gl.constexpr):
    """Return 1 / sqrt(sum of squares + EPS) of each row, 1 without NORM, [C]."""
    lengths = gl.full([CONFIG.C], 1.0, gl.float32, gl.SliceLayout(1, x.type.layout))
    if CONFIG.NORM:
        squares = gl.inline_asm_elementwise(_SQUARES, "=f,=f,r", [x], gl.float32, True, 2)
        lengths = gl.rsqrt(gl.sum(squares, 1) + CONFIG.EPS)
    return lengths


@gluon.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=UNALIGNED)
def channel_matrices_kernel(
    q, k, decay, beta, positions, tail_k, tail_decay, tail_beta, query_start_loc, seq_lens,
    slots, sources, planes, factors, scale, num_reqs, CONFIG: gl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one state head. Arguments and grid of `long_matrices_kernel`. One
    warp for each 32 columns."""
    C: gl.constexpr = CONFIG.C
    PLANES: gl.constexpr = plane_size(C, CONFIG.PART, CONFIG.DELTA, True)
    FACTORS: gl.constexpr = factor_size(C, CONFIG.PART, True)
    TOKEN: gl.constexpr = gl.SliceLayout(1, row_layout(C, CONFIG.PART))
    place, head, row = gl.program_id(0), gl.program_id(1), gl.arange(0, C, TOKEN)
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    number = find_request(query_start_loc, place, num_reqs, C, 128, CONFIG.EXTRA, lane)
    if number == num_reqs:
        return
    request = requests.open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if (request.slot < 0) | (request.count <= 0):
        return
    base = requests.load_base(positions, request, head, 0, CONFIG)
    own = place - request.first // C - number * CONFIG.EXTRA
    if own >= pieces.count_chunks(request, base, CONFIG):
        return
    tokens = requests.open_head(Tokens(q, k, k, decay, beta), head, CONFIG)
    tails = Tail(tail_k, tail_k, tail_decay, tail_beta)
    tail = requests.open_tail(tails, request.source, head, CONFIG)
    part = pieces.open_part(request, base, own, CONFIG)
    index = place.to(gl.int64) * CONFIG.HV + head
    plane, vector = planes + index * PLANES, factors + index * FACTORS
    if (part.held <= 0) & (part.stop - part.start == C):
        queries, keys, decays = _load_chunk(part, tokens, tail, True, CONFIG)
    else:
        queries, keys, decays = _load_chunk(part, tokens, tail, False, CONFIG)
    betas = gl.full([C], 1.0, gl.float32, TOKEN)
    if CONFIG.HAS_BETA:
        old, new = tail.beta, tokens.beta
        betas = pieces.load_numbers(part, row, old, new, CONFIG.HV, CONFIG.B_T, CONFIG)
    gl.store(vector + row, betas)
    norms = _inverse_lengths(queries, CONFIG) * scale, _inverse_lengths(keys, CONFIG)
    sums = blocks.allocate_sums(CONFIG), blocks.allocate_sums(CONFIG)
    channel_products(queries, keys, norms, betas, decays, plane, vector, sums, CONFIG)
    blocks.store_matrix(plane, blocks.load_blocks(sums[0]))
    if CONFIG.DELTA:
        blocks.store_matrix(plane + 2 * C * C, blocks.invert(blocks.load_blocks(sums[1])))
