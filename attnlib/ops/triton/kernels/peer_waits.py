"""How long a kernel waits for another rank, and what it leaves behind when it cannot go on.

CUDA's error ends a kernel without a wrong result, but it has no text: the host finds a record of
the rank and the exchange.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

__all__ = ["QUERIES", "RESULTS", "TWICE", "begun", "overlap", "stop_if", "waited"]

_POLLS: tl.constexpr = tl.constexpr(1 << 10)
"""Reads of words, of about a microsecond each, between two looks at the clock."""
QUERIES: tl.constexpr = tl.constexpr(1)
RESULTS: tl.constexpr = tl.constexpr(2)
TWICE: tl.constexpr = tl.constexpr(4)
"""What a record says: a rank is late with its QUERIES or RESULTS; with TWICE, this rank exchanged
them on two streams at once. `PeerBuffers.error` reads it."""


@triton.jit
def _now(polls, ON_GPU: tl.constexpr):
    """Nanoseconds, or polls where there is no clock: int64."""
    if ON_GPU:
        found = globaltimer()
    else:
        found = polls.to(tl.int64)
    return found


@triton.jit
def overlap(counter, distances, PDL: tl.constexpr):
    """Wait for the kernel before, if the launch is programmatic, and let the next one start. What a
    program loads first is brought into L2, through which keys stream, and is kept there."""
    if PDL:
        tl.inline_asm_elementwise(
            """
            prefetch.global.L2::evict_last [$1];
            prefetch.global.L2::evict_last [$2];
            mov.b32 $0, 0;
            """,
            "=r,l,l",
            [counter.to(tl.int64), distances.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def waited(polls, began, waits, ON_GPU: tl.constexpr):
    """One poll more: the polls, when the wait began by the clock, and whether a wait of this rank
    takes too long. Clocks of threads differ, which would leave a loop one by one: an atomic
    operation, of one thread, decides for all."""
    polls += 1
    too_long = tl.full((), 0, tl.int64)
    if polls % _POLLS == 0:
        now = _now(polls, ON_GPU)
        began = tl.where(began == 0, now, began)
        late = (now - began >= tl.load(waits)).to(tl.int64)
        too_long = tl.atomic_or(waits + 1, late, sem="relaxed")
    return polls, began, too_long


@triton.jit
def begun(counter, number, ON_GPU: tl.constexpr):
    """Note that exchange `number` has begun; whether another kernel has done so, an int32 for
    `stop_if`. One thread finds out, and what follows does not wait for it."""
    if ON_GPU:
        found = tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.b32 $0, $2;
            @first atom.relaxed.gpu.global.cas.b32 $0, [$1], $2, $3;
            sub.s32 $0, $0, $2;
            }""",
            "=&r,l,r,r",
            [counter.to(tl.int64), number - 1, number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.atomic_cas(counter, number - 1, number) - (number - 1)
    return found


@triton.jit
def stop_if(failed, what: tl.constexpr, rank, number, waits, ON_GPU: tl.constexpr):
    """Leave a record where the host finds it (`PeerBuffers.record`), and end with an error of CUDA
    2 s later: the error may end the process, which reports it before.

    `failed` is not 0 in a thread that stops the kernel.
    """
    where = (tl.full((), what, tl.int64) << 48) | (rank.to(tl.int64) << 32)
    record = where | (number.to(tl.int64) & 0xFFFFFFFF)
    if ON_GPU:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b64 address, began, now;
            setp.eq.s32 p, $1, 0;
            @p bra GOES_ON;
            ld.global.b64 address, [$3 + 16];
            st.global.b64 [address], $2;
            membar.sys;
            mov.u64 began, %globaltimer;
            WAITS:
            mov.u64 now, %globaltimer;
            sub.u64 now, now, began;
            setp.lt.u64 p, now, 2000000000;
            @p bra WAITS;
            trap;
            GOES_ON:
            mov.b32 $0, $1;
            }""",
            "=r,r,l,l",
            [failed, record, waits.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif failed != 0:
        tl.store(tl.load(waits + 2).to(tl.pointer_type(tl.int64)), record)
