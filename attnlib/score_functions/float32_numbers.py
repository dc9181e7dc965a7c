"""Numbers next to integers are float32 in kernels, and on tensors of the default dtype of torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["float32_numbers"]

_lock = threading.Lock()
_users = 0
_dtype = torch.float32
"""The default dtype before the first of the users."""


@contextmanager
def float32_numbers() -> Iterator[None]:
    """Within the block, integers times numbers are float32, whatever the default dtype is.

    The default dtype is that of all threads: the last of the blocks that run restores it.
    """
    global _users, _dtype
    with _lock:
        if not _users and (_dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _dtype != torch.float32:
                torch.set_default_dtype(_dtype)
