"""Engines that run at once make one call at a time, in turn."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from watch import Watch

__all__ = ["turn"]


@contextlib.contextmanager
def turn(turns: Path | None, watch: Watch, lock: int = fcntl.LOCK_EX) -> Iterator[None]:
    """While no other engine has its turn; engines that start share one (LOCK_SH).

    Args:
        turns: the file that the engines lock; None for none.
        watch: names the process that took the last turn while this one waits for its own.
        lock: exclusive or shared.
    """
    if turns is None:
        yield
        return
    with turns.open("a+") as file:
        file.seek(0)
        holder = file.read().strip() or "nobody"
        try:
            fcntl.flock(file, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            with watch.part(f"waits for its turn; the last one to have it was {holder}"):
                fcntl.flock(file, lock)
        try:
            file.truncate(0)
            print(os.getpid(), *sys.argv[1:], file=file, flush=True)
            yield
        finally:
            # Closing the file is not enough: a process that was forked meanwhile keeps the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
