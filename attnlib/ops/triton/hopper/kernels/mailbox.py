"""Work items of the Hopper prefill, in a mailbox of two slots in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["publish", "read_field"]


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
    FIELDS: gl.constexpr,
):  # fmt: skip
    """Publish a work item to the consumers and the value loader; request -1 ends their loops."""
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
    mbarrier.arrive(mail_full.index(slot), count=1)
