"""Value rows of a program of the recurrence over states, its warps and its registers.

All depend on the layer and on the kind of its steps only (T18). Each column of a product is a sum
of its own, so rows, warps and registers change no bits; the columns of the keys that are multiplied
at a time do, and all kinds of steps share them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from attnlib.ops.states.inputs import RecurrenceParams
from attnlib.ops.states.layout import POSITION_COPIES, StateLayout

__all__ = [
    "LARGEST_CHUNK",
    "LARGEST_HEAD",
    "LONG_CHUNK",
    "TILES",
    "StateChoice",
    "StateTile",
    "can_copy",
    "kind_of_step",
    "long_chunk",
    "long_tile",
    "state_tile",
]

LARGEST_HEAD = 256
"""Largest key and value size: a program keeps its rows of the state in registers."""
LARGEST_CHUNK = 32
"""Tokens of a chunk of the slots. With 64, kernels of decodes of 128 keys spill 1600 to 3800 bytes
per thread on sm_89."""
MOST_DRAFTS = 7
"""Most tokens that can be taken back of layers whose decodes copy states to shared memory: each new
token has a query and outputs in registers."""
LONG_CHUNK = 32
"""Tokens that a long step computes at a time on Hopper where its bits may depend on its length, and
the largest chunk of the slots in these kernels; 0 for no use of them."""
_LONG_ROWS = 64
"""Value rows of a program of such a step: its products have so many."""
MOST_COLUMNS = 32


class StateChoice(NamedTuple):
    """What can be chosen for a kind of steps.

    Attributes:
        rows: most value rows that a program computes at a time, a power of two of at least 16.
            Those of chunks are 32: chips multiply 64 rows by other instructions, with other bits,
            where a program has enough warps.
        num_warps: of a program, for heads of at most 128 and chunks of 16 tokens.
        registers: most of a thread on NVIDIA's chips, 0 for the compiler's choice; for "row"
            decodes only.
        num_stages: of the loop over chunks on NVIDIA's chips, for chunks of 16 tokens; with more
            than 1, the chunk after is loaded while a chunk is computed.
        is_whole: a program computes all value rows of a head, one pass after the other, so that
            what they share is computed once; for decodes only.
        group: rows of the tail that a decode in the form of `kernels.state_decode` loads at a time,
            a power of two; its `rows` are those of a program, which computes 64 of them at a time
            where it fills a chunk. For decodes only, 2 to 16 with `copies` (`state_tile` asserts
            it); 0 for steps in chunks.
        copies: such a decode copies the state to shared memory (`hopper.kernels.state_decode`).
    """

    rows: int
    num_warps: int
    registers: int = 0
    num_stages: int = 1
    is_whole: bool = False
    group: int = 0
    copies: bool = False


TILES = {
    # Several programs fit an SM, so that some compute while others wait.
    "decode": StateChoice(32, 2, is_whole=True),
    "wide decode": StateChoice(32, 4, is_whole=True),
    "step": StateChoice(32, 8),
    "row decode": StateChoice(64, 2, registers=168, group=2),
    "wide row decode": StateChoice(128, 4, registers=168, group=2),
    "copied few row decodes": StateChoice(64, 4, group=4, copies=True),
    "copied row decode": StateChoice(128, 4, group=4, copies=True),
    "copied wide row decode": StateChoice(64, 2, group=4, copies=True),
    "prefill": StateChoice(32, 2, num_stages=2),
    "wide prefill": StateChoice(32, 4, num_stages=2),
}
"""Kind of steps -> choice. A "step" has too few heads for the chip, or tokens that can be taken
back; "row" decodes have the form of `kernels.state_decode`; "wide" are a decay for each channel,
float32 inputs or, of "copied" ones, such tokens. `benchmarks/gpu/state_tiles.py` measures
others."""


class StateTile(NamedTuple):
    """A tile of a state.

    Attributes:
        rows, passes: value rows that a program computes at a time, a power of two of at least 16,
            and how often.
        group: as of a `StateChoice`, 0 for steps in chunks.
        part, parts: columns of the keys that are multiplied at a time, and their number.
        blocks: programs of a head, at most `POSITION_COPIES`.
        num_warps, registers, num_stages, copies: as of a `StateChoice`, for this head.
    """

    rows: int
    passes: int
    group: int
    part: int
    parts: int
    blocks: int
    num_warps: int
    registers: int
    num_stages: int
    copies: bool = False

    def options(self, is_amd: bool) -> dict[str, int]:
        """The options of a launch. Warps of AMD have 64 threads."""
        if is_amd:
            return {"num_warps": min(self.num_warps, 4), "num_stages": 1}
        most = {"maxnreg": self.registers} if self.registers else {}
        most["launch_pdl"] = self.copies  # these kernels wait for the one before
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **most}


def long_chunk(
    layout: StateLayout, capability: tuple[int, int], is_invariant: bool, max_query_len: int = 0
) -> int:
    """Tokens that the kernels of long steps compute at a time on a chip, if all inputs are
    bfloat16: a chunk of the slots where bits may not depend on steps (T18), else `LONG_CHUNK`; 0 if
    other kernels run steps of at most `max_query_len` tokens."""
    sizes = layout.key_size in (64, 128) and layout.value_size % _LONG_ROWS == 0
    fits = capability[0] == 9 and sizes and layout.dtype == torch.bfloat16
    least = 0 if is_invariant else max(LONG_CHUNK, layout.max_rollback + 2)
    if not fits or max_query_len < least or layout.chunk_size > LONG_CHUNK:
        return 0
    return layout.chunk_size if is_invariant else LONG_CHUNK


def long_tile(layout: StateLayout, is_short: bool) -> StateTile:
    """The tile of such steps, of four warps beside those that load; without these in short ones,
    whose registers are limited so that three programs fit an SM."""
    blocks = layout.value_size // _LONG_ROWS
    registers = 168 * (is_short and layout.decay != "channel")
    return StateTile(_LONG_ROWS, 1, 0, layout.key_size, 1, blocks, 4, registers, 1)


def can_copy(layout: StateLayout, capability: tuple[int, int]) -> bool:
    """Whether the decodes that copy states to shared memory take a layer on a chip, also several
    tokens of a request that may be taken back."""
    if layout.max_rollback > MOST_DRAFTS:
        return False
    halves = layout.dtype in (torch.float16, torch.bfloat16) and layout.state_dtype == torch.float32
    sizes = layout.key_size in (64, 128) and layout.value_size in (64, 128, 256)
    return capability[0] == 9 and halves and sizes and layout.chunk_size == 16


def kind_of_step(
    layout: StateLayout, params: RecurrenceParams, is_long: bool, fills_chip: bool, copies: bool
) -> str:
    """The key of `TILES` for the steps of a layer.

    Args:
        layout: of its slots.
        params: of its recurrence.
        is_long: the step has more than D + 1 tokens.
        fills_chip: the heads of all requests are enough programs for the chip.
        copies: the kernels that copy states to shared memory take the step.
    """
    wide = "" if layout.decay != "channel" and layout.dtype != torch.float32 else "wide "
    if is_long:
        return f"{wide}prefill"
    if not params.is_invariant and (copies or not layout.max_rollback):
        row = "wide row decode" if layout.max_rollback else f"{wide}row decode"
        if copies:
            return f"copied {row}" if fills_chip else "copied few row decodes"
        if fills_chip:
            return row
    return f"{wide}decode" if fills_chip and not layout.max_rollback else "step"


def state_tile(key_size: int, value_size: int, chunk_size: int, kind: str) -> StateTile:
    """The tile of heads of this size, both at most `LARGEST_HEAD`, in a kind of steps."""
    choice = TILES[kind]
    assert not choice.copies or choice.group in (2, 4, 8, 16), f"{kind}: {choice}"
    is_decode = "decode" in kind
    if choice.group and is_decode:
        choice = choice._replace(copies=choice.copies and kind.startswith("copied"))
        return _row_tile(key_size, value_size, choice)
    part = min(MOST_COLUMNS, max(16, triton.next_power_of_2(key_size)))
    largest = max(16, triton.next_power_of_2(value_size))
    # Four warps or more multiply 64 rows by the same instructions in all kinds of steps.
    rows = 64 if value_size > 128 else min(choice.rows, largest)
    passes = largest // rows if choice.is_whole and is_decode else 1
    parts, blocks = triton.cdiv(key_size, part), triton.cdiv(value_size, rows * passes)
    assert blocks <= POSITION_COPIES
    is_large = max(key_size, value_size) > 128 or chunk_size > 16
    warps = min(choice.num_warps * (2 if is_large else 1), 8)
    stages = choice.num_stages if chunk_size == 16 else 1
    return StateTile(rows, passes, 0, part, parts, blocks, warps, 0, stages)


def _row_tile(key_size: int, value_size: int, choice: StateChoice) -> StateTile:
    """The same of a row decode: a program has no more registers for its state with larger heads."""
    keys, largest = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    span = max(choice.rows * 128 // max(128, keys), 16, largest // POSITION_COPIES)
    span = min(span, largest)
    rows, warps = min(span, 64 if choice.num_warps > 2 else 32), choice.num_warps
    if choice.copies:  # others compute `rows` at a time, where a chunk is filled
        rows, warps = span, max(1, warps * span // choice.rows)
    part = min(MOST_COLUMNS, keys)
    parts, blocks = triton.cdiv(key_size, part), triton.cdiv(value_size, span)
    options = warps, choice.registers, 1, choice.copies
    return StateTile(rows, span // rows, choice.group, part, parts, blocks, *options)
