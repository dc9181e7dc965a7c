"""Work items of the Hopper prefill, in a mailbox of two slots in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier

__all__ = ["publish", "read_field", "read_tiles", "receive"]

_FIRST_TILE_FIELD: gl.constexpr = gl.constexpr(6)


@gluon.jit
def _write_field(mailbox, index, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mailbox.index(index).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def read_field(mailbox, index):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(mailbox.index(index).load(layout), 0)


@gluon.jit
def publish(
    mailbox, mail_full, mail_empty, mail, request, start, first_token, kv_head, query_len, seq_len,
    begin, left_end, right_begin, end, left_b, right_b, after_gap, gap, RANGES: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    """Publish a work item to the consumers and the value loader; request -1 ends their loops.

    `begin` to `gap` are the results of `schedule.bounded_tiles` with a score function of RANGES.
    """
    slot = mail % 2
    # Wait until all readers have copied the item that the slot held before. The parity is inverted,
    # so that the first use of each slot does not wait.
    mbarrier.wait(mail_empty.index(slot), ((mail // 2) & 1) ^ 1)
    _write_field(mailbox, slot * FIELDS, request)
    _write_field(mailbox, slot * FIELDS + 1, start)
    _write_field(mailbox, slot * FIELDS + 2, first_token)
    _write_field(mailbox, slot * FIELDS + 3, kv_head)
    _write_field(mailbox, slot * FIELDS + 4, query_len)
    _write_field(mailbox, slot * FIELDS + 5, seq_len)
    if RANGES > 0:
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD, begin)
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 1, left_end)
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 2, right_begin)
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 3, end)
    if RANGES == 2:
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 4, left_b)
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 5, right_b)
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 6, after_gap)
        _write_field(mailbox, slot * FIELDS + _FIRST_TILE_FIELD + 7, gap)
    if gl.num_warps() > 1:
        # All warps have written their fields.
        partition_barrier()
    mbarrier.arrive(mail_full.index(slot), count=1)


@gluon.jit
def read_tiles(mailbox, slot, RANGES: gl.constexpr, FIELDS: gl.constexpr):
    """Return the tiles of a work item; 0 for fields that do not exist."""
    begin = 0
    left_end = 0
    right_begin = 0
    end = 0
    left_b = 0
    right_b = 0
    after_gap = 0
    gap = 0
    if RANGES > 0:
        first = slot * FIELDS + _FIRST_TILE_FIELD
        begin = read_field(mailbox, first)
        left_end = read_field(mailbox, first + 1)
        right_begin = read_field(mailbox, first + 2)
        end = read_field(mailbox, first + 3)
    if RANGES == 2:
        left_b = read_field(mailbox, first + 4)
        right_b = read_field(mailbox, first + 5)
        after_gap = read_field(mailbox, first + 6)
        gap = read_field(mailbox, first + 7)
    return begin, left_end, right_begin, end, left_b, right_b, after_gap, gap


@gluon.jit
def receive(mailbox, mail_full, mail_empty, mail, RANGES: gl.constexpr, FIELDS: gl.constexpr):
    """Wait for the key loader to publish item number `mail`, copy it, and release its slot.

    Returns:
        The arguments of `publish` from `request` to `gap`.
    """
    slot = mail % 2
    mbarrier.wait(mail_full.index(slot), (mail // 2) & 1)
    request = read_field(mailbox, slot * FIELDS)
    start = read_field(mailbox, slot * FIELDS + 1)
    first_token = read_field(mailbox, slot * FIELDS + 2)
    kv_head = read_field(mailbox, slot * FIELDS + 3)
    query_len = read_field(mailbox, slot * FIELDS + 4)
    seq_len = read_field(mailbox, slot * FIELDS + 5)
    begin, left_end, right_begin, end, left_b, right_b, after_gap, gap = read_tiles(
        mailbox, slot, RANGES, FIELDS
    )
    mbarrier.arrive(mail_empty.index(slot), count=1)
    return (
        request, start, first_token, kv_head, query_len, seq_len, begin, left_end, right_begin, end,
        left_b, right_b, after_gap, gap,
    )  # fmt: skip
