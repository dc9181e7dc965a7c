"""Keys of device functions that are equal in every process, with Triton 3.6 and 3.7.

The key of a device function covers the compile-time constants that it and its callees read from
their modules. These releases leave out those of a callee whose key nobody has computed before, and
order constants of one name by the addresses of their modules. A kernel then has several keys, and a
server does not find what `attnlib compile` wrote for it. Triton 3.8 computes the keys of callees
first and orders constants by their values. `settle_keys` does so for attnlib's kernels.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import triton

__all__ = ["compute_keys", "settle_keys"]

_NEEDED = triton.__version__.startswith(("3.6.", "3.7."))


def settle_keys(*values: Any) -> None:
    """Compute the keys of device functions before Triton does: of kernels before their first
    launch, and of functions among their constants.

    Args:
        values: device functions, and constants of any other type, which it ignores.
    """
    if not _NEEDED:
        return
    for value in values:
        if getattr(value, "hash", "") is None and hasattr(value, "_hash_lock"):
            with value._hash_lock:
                if value.hash is None:
                    _compute(value)


def compute_keys(*kernels: Any) -> None:
    """Compute the keys of kernels now, in every release of Triton; another thread may need them at
    the same time."""
    settle_keys(*kernels)
    for kernel in kernels:
        _ = kernel.cache_key


def _compute(function: Any) -> None:
    """Store the key, and the globals that Triton compares at each of its launches."""
    from triton.language.core import constexpr
    from triton.runtime.jit import DependenciesFinder

    function.hash = f"recursion:{function._fn_name}"  # as Triton does: a function may call itself
    nonlocals, source = inspect.getclosurevars(function.fn).nonlocals, function.src
    finder: Any = DependenciesFinder(function._fn_name, function.__globals__, nonlocals, source)
    add_callee = finder._update_hash

    def add_settled(callee: Any) -> None:
        settle_keys(callee)
        _ = callee.cache_key  # waits for another thread that computes it
        add_callee(callee)

    finder._update_hash = add_settled
    finder.visit(function.parse())
    used = finder.used_global_vals
    named = ((name, value) for (name, _), (value, _) in used.items())
    constants = [pair for pair in named if isinstance(pair[1], constexpr)]
    constants.sort(key=lambda pair: (pair[0], repr(pair[1])))
    key = f"{finder.ret}{function.starting_line_number}{constants}"
    function.used_global_vals = used
    function.hash = hashlib.sha256(key.encode()).hexdigest()
