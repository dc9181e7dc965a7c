"""The two products of a tile, Q @ K^T and P @ V, and their operands.

Weights are carried from one step to the next in packed form.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

__all__ = [
    "hidden_zero",
    "keep_queries",
    "multiply_keys",
    "multiply_parts",
    "multiply_pieces",
    "multiply_values",
    "pack_weights",
    "query_pieces",
    "unpack_weights",
    "wait_for_tile",
]


@gluon.jit
def pack_weights(weights, DTYPE: gl.constexpr):
    """Convert float32 weights [M, N] to pairs of DTYPE in 32-bit words [M, N // 2]."""
    # As loop-carried values, 16-bit elements take a register each and are packed again for every
    # product. Words take half of the registers.
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    low, high = gl.split(gl.reshape(weights, [M, N // 2, 2]))
    if DTYPE == gl.bfloat16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    return words


@gluon.jit
def unpack_weights(words, DTYPE: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Convert packed weights to the register operand [M, N] of the product with the values."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] * 2
    low = words.to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [M, N]), P_LAYOUT)


@gluon.jit
def wait_for_tile(full, stage, parity, COPIED: gl.constexpr):
    """Wait until a stage of a ring has been loaded; COPIED: by `cp.async`, and not by TMA."""
    mbarrier.wait(full.index(stage), parity)
    if COPIED:
        # WGMMA reads shared memory through the async proxy.
        fence_async_shared()


@gluon.jit
def hidden_zero(step):
    """Return 0 as a function of a step that the compiler cannot evaluate.

    Matrix descriptors of operands at a constant address would be kept in registers during the whole
    loop: two for each 16 elements of the head.
    """
    return gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [step], gl.int32, True, 1)


@gluon.jit
def _multiply_part(
    q_operand, k_tile, scores, HALF: gl.constexpr, REST: gl.constexpr, SIZE: gl.constexpr
):
    """Issue the product over the SIZE elements that are a part of the REST after HALF, if any."""
    START: gl.constexpr = HALF + REST // (2 * SIZE) * (2 * SIZE)
    if REST % (2 * SIZE) >= SIZE:
        keys = k_tile.slice(START, SIZE, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand.slice(START, SIZE, 1), keys, scores, is_async=True)
    return scores


@gluon.jit
def multiply_keys(q_operand, k_tile, zeros, ELEMENTS: gl.constexpr):
    """Issue Q @ K^T over the first ELEMENTS elements of a head, a multiple of 16."""
    WIDTH: gl.constexpr = k_tile.shape[1]
    if ELEMENTS == WIDTH:
        scores = warpgroup_mma(
            q_operand, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
    else:
        # The rest after the first half in parts of powers of two.
        HALF: gl.constexpr = WIDTH // 2
        scores = warpgroup_mma(
            q_operand.slice(0, HALF, 1),
            k_tile.slice(0, HALF, 1).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        for bit in gl.static_range(4):
            scores = _multiply_part(q_operand, k_tile, scores, HALF, ELEMENTS - HALF, 128 >> bit)
    return scores


@gluon.jit
def multiply_values(weights, v_tile, acc, PART: gl.constexpr):
    """Issue P @ V + acc, over part PART of the value elements; -1 is all."""
    COLUMNS: gl.constexpr = acc.shape[1]
    values = v_tile
    if PART >= 0:
        values = v_tile.slice(PART * COLUMNS, COLUMNS, 1)
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def multiply_parts(q_operand, k_ring, stage, zeros, KEY_PARTS: gl.constexpr):
    """Issue the product of queries with the keys of a stage, both divided into parts.

    Args:
        q_operand: tuple of KEY_PARTS parts [M, width], or that of `keep_queries`.
        k_ring: [STAGES * KEY_PARTS, N, width] in shared memory.
        zeros: [M, N] in the layout of the result.
    """
    scores = zeros
    if len(q_operand) == KEY_PARTS:
        for part in gl.static_range(KEY_PARTS):
            scores = warpgroup_mma(
                q_operand[part],
                k_ring.index(stage * KEY_PARTS + part).permute((1, 0)),
                scores,
                use_acc=part > 0,
                is_async=True,
            )
    else:
        second = k_ring.index(stage * KEY_PARTS + 1)
        keys = k_ring.index(stage * KEY_PARTS).permute((1, 0))
        scores = warpgroup_mma(q_operand[0], keys, scores, use_acc=False, is_async=True)
        keys = second.slice(0, 16, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand[1], keys, scores, is_async=True)
        keys = second.slice(16, 16, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand[2], keys, scores, is_async=True)
        keys = second.slice(32, 32, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand[3], keys, scores, is_async=True)
        keys = k_ring.index(stage * KEY_PARTS + 2).permute((1, 0))
        scores = warpgroup_mma(q_operand[4], keys, scores, is_async=True)
    return scores


@gluon.constexpr_function
def _pieces(rest):
    """Return the parts (start, size) of powers of two of `rest` elements, 16 to 64."""
    return [(rest // (2 * n) * (2 * n), n) for n in (64, 32, 16) if rest % (2 * n) >= n]


@gluon.jit
def query_pieces(
    queries, number, ELEMENTS: gl.constexpr, LAYOUT: gl.constexpr, IN_REGISTERS: gl.constexpr
):
    """Return queries in three parts as operands of `multiply_pieces`.

    Args:
        ELEMENTS: elements that products read, 144 to 192 and a multiple of 16.
        LAYOUT: of operands in registers.
        IN_REGISTERS: whether the queries are loaded to registers, or stay in shared memory.

    Returns:
        Tuple of elements [0, 64), [64, 128), and parts of powers of two of the rest.
    """
    third = queries.tile(number, 2)
    PIECES: gl.constexpr = _pieces(ELEMENTS - 128)
    pieces = (queries.tile(number), queries.tile(number, 1))
    for part in gl.static_range(len(PIECES)):
        pieces = pieces + (third.slice(PIECES[part][0], PIECES[part][1], 1),)
    if IN_REGISTERS:
        loaded = ()
        for piece in gl.static_range(len(pieces)):
            loaded = loaded + (pieces[piece].load(LAYOUT),)
        return loaded
    else:
        return pieces


@gluon.jit
def multiply_pieces(pieces, k_ring, stage, zeros):
    """Issue the product of `query_pieces` with the keys of a stage, in three parts."""
    keys = k_ring.index(3 * stage).permute((1, 0))
    scores = warpgroup_mma(pieces[0], keys, zeros, use_acc=False, is_async=True)
    keys = k_ring.index(3 * stage + 1).permute((1, 0))
    scores = warpgroup_mma(pieces[1], keys, scores, is_async=True)
    third = k_ring.index(3 * stage + 2)
    FIRST: gl.constexpr = pieces[2].shape[1]
    keys = third.slice(0, FIRST, 1).permute((1, 0))
    scores = warpgroup_mma(pieces[2], keys, scores, is_async=True)
    if len(pieces) > 3:
        keys = third.slice(FIRST, pieces[3].shape[1], 1).permute((1, 0))
        scores = warpgroup_mma(pieces[3], keys, scores, is_async=True)
    return scores


@gluon.jit
def keep_queries(first, second, third, LAYOUT: gl.constexpr):
    """Load 80 elements of queries in three parts of 64 to registers; return the operand.

    Products of 64 keys read as many bytes of queries as of keys from shared memory, together as
    much as it delivers. With 16 more elements, three consumers need local memory.

    Returns:
        Elements [0, 64) and [64, 80) in registers, and [80, 96), [96, 128) and [128, 192) in shared
        memory.
    """
    return (
        first.load(LAYOUT),
        second.slice(0, 16, 1).load(LAYOUT),
        second.slice(16, 16, 1),
        second.slice(32, 32, 1),
        third,
    )
