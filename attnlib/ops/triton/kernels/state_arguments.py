"""The arguments of the kernels of state layers as objects, see `arguments`.

Strides and sizes of a layer are constants: they are the same in all steps of a layer, and the
compiler then knows the alignment of every row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from attnlib.ops.states.inputs import LEAST_LOG_DECAY

__all__ = [
    "LEAST_DECAY",
    "UNALIGNED",
    "Chunk",
    "Factors",
    "Request",
    "Results",
    "Rows",
    "Slots",
    "StateBatch",
    "StateConfig",
    "Tail",
    "Tokens",
    "numbers",
]

LEAST_DECAY: tl.constexpr = tl.constexpr(LEAST_LOG_DECAY)

UNALIGNED = ["query_start_loc", "seq_lens", "slots", "sources", "decay", "beta", "skip"]
"""Pointers whose alignment must not select a compilation: slices with arbitrary offsets."""


def numbers(count: Any, _semantic: Any = None) -> Any:
    """The numbers up to `count`, of which a comprehension makes as many tensors.

    Runs in the compiler, where `_semantic` is given, and in the interpreter.
    """
    found = range(getattr(count, "value", count))
    return tuple(found if _semantic is None else map(tl.constexpr, found))


numbers.__triton_builtin__ = True  # type: ignore[attr-defined]  # how the compiler finds it


class StateConfig(NamedTuple):
    """Constants of the kernels of the recurrence.

    Attributes:
        UNIT: the chunk of the slots: states are stored at its multiples.
        C, LEVELS: tokens that are computed at a time, and the logarithm of C to base 2. More than
            UNIT in `hopper.kernels.state_long` only, if bits may depend on steps.
        D: tokens that can be taken back.
        RING: rows of a tail; position p is in row p % RING.
        HV, HK: state heads and key heads.
        DK, PART, PARTS: key size, and the columns of keys and states that are multiplied at a time.
        RELOAD: parts of queries and keys are loaded where they are used. Every warp holds all of
            them, which are as many registers as its part of the state.
        DV, ROWS, BLOCKS: value size, value rows that are computed at a time, programs of a head.
        PASSES: how many times ROWS value rows a program computes, one after the other.
        WARPS, GROUP: of decodes in the form of `state_decode`, and the rows of the tail that are
            loaded at a time; 0 for steps in chunks.
        QUERIES: most new tokens of a request in `hopper.kernels.state_decode`, a power of two.
        CHUNKS: most chunks of a request that `hopper.kernels.state_serial` copies at once; 0 where
            a request may have more.
        COPIES: pairs of positions of a head, at least BLOCKS.
        DELTA, DECAY, NORM, HAS_BETA, HAS_SKIP: the recurrence; DECAY is as in `StateLayout.decay`.
        EPS: of the norm.
        PRECISION: of products with float32 operands (`tl.dot`).
        WIDE: products of queries and keys have float32 operands, for the interpreter.
        EXTRA: chunks that a request may need besides one for each C new tokens.
        PREPARED: the matrices of the chunks are in the workspace, and another launch writes the
            tail and the positions.
        Q_T, Q_H, K_T, K_H, V_T, V_H, O_T, O_H, G_T, G_H, B_T, B_H: strides of tokens and heads.
        STATE, POSITIONS, TAIL_K, TAIL_V, TAIL_G, TAIL_B: strides of slots.
    """

    UNIT: int
    C: int
    LEVELS: int
    D: int
    RING: int
    HV: int
    HK: int
    DK: int
    PART: int
    PARTS: int
    RELOAD: bool
    DV: int
    ROWS: int
    BLOCKS: int
    PASSES: int
    WARPS: int
    GROUP: int
    QUERIES: int
    CHUNKS: int
    COPIES: int
    DELTA: bool
    DECAY: str
    NORM: bool
    HAS_BETA: bool
    HAS_SKIP: bool
    EPS: float
    PRECISION: str
    WIDE: bool
    EXTRA: int
    PREPARED: bool
    Q_T: int
    Q_H: int
    K_T: int
    K_H: int
    V_T: int
    V_H: int
    O_T: int
    O_H: int
    G_T: int
    G_H: int
    B_T: int
    B_H: int
    STATE: int
    POSITIONS: int
    TAIL_K: int
    TAIL_V: int
    TAIL_G: int
    TAIL_B: int


class StateBatch(NamedTuple):
    """Lengths and slots of the requests."""

    query_start_loc: Any
    seq_lens: Any
    slots: Any
    sources: Any


class Request(NamedTuple):
    """One request, all scalars.

    Attributes:
        slot, source: the slots to write and to read.
        first, count: its first token in the batch and the number of its tokens.
        computed, end: positions of its first token and behind its last one.
    """

    slot: Any
    source: Any
    first: Any
    count: Any
    computed: Any
    end: Any


class Tokens(NamedTuple):
    """The inputs of a step: pointers. Decays of a layer stand for those of its tokens where they
    are constant."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any


class Tail(NamedTuple):
    """The inputs of earlier tokens in the slots: pointers, [slots, RING, heads, size]."""

    k: Any
    v: Any
    decay: Any
    beta: Any


class Slots(NamedTuple):
    """States, positions and tails of all slots: pointers, and a `Tail`."""

    state: Any
    positions: Any
    tail: Any


class Results(NamedTuple):
    """What outputs follow from besides inputs and slots.

    Attributes:
        skip, out: pointers to the skip factors and to the outputs.
        workspace: pointer to the matrices of the batch, with PREPARED.
        scale: of queries.
    """

    skip: Any
    out: Any
    workspace: Any
    scale: Any


class Chunk(NamedTuple):
    """The inputs of a chunk for one head, without values; rows without a token are 0.

    Attributes:
        parts: queries and keys of each part, [C, PART] as stored; none with RELOAD.
        decay: [C] float32; with decays per channel, parts [C, PART].
        beta: [C] float32.
        rows, tokens, tail: where queries and keys are.
    """

    parts: Any
    decay: Any
    beta: Any
    rows: Any
    tokens: Any
    tail: Any


class Rows(NamedTuple):
    """The rows of a chunk, [C].

    Attributes:
        position: of the token.
        held, fresh: rows whose token is in the tail, and in the step.
        ring, token: rows of the tail and of the batch, int64.
    """

    position: Any
    held: Any
    fresh: Any
    ring: Any
    token: Any


class Factors(NamedTuple):
    """What the rows of a chunk are multiplied by.

    Attributes:
        total: sum of the decays up to each row, in the shape of `Chunk.decay`.
        norm_q, norm_k: inverse lengths of queries, times the scale, and of keys, [C].
    """

    total: Any
    norm_q: Any
    norm_k: Any
