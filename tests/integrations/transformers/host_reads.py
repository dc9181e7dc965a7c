"""Finds reads of tensor values by the host, which would wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero", "__array__", "__bool__", "__int__"),
        *("__float__", "__index__", "__contains__"),
    )
) | {torch.nonzero, torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose}


class HostReads(TorchFunctionMode):
    """Follows tensors, and everything that is computed from them, and records host reads of these.

    The mode finds on a CPU what would synchronize on a GPU.

    Attributes:
        reads: names of the functions that read values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._followed: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._active = True

    def follow(self, tensor: torch.Tensor) -> None:
        """Follow a tensor."""
        self._followed[id(tensor)] = tensor

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of code that may read: interpreted kernels do."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function; record it if it reads, follow its result otherwise."""
        out = func(*args, **(kwargs or {}))
        if not self._active:
            return out
        inputs = tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and id(leaf) in self._followed for leaf in inputs):
            if func in _READS or _depends_on_values(func, args, kwargs or {}):
                self.reads.append(getattr(func, "__name__", str(func)))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._followed[id(leaf)] = leaf
        return out


def _depends_on_values(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call moves a tensor to the host, or its result has a size that values determine."""
    if func is torch.Tensor.to:
        return "cpu" in (*args[1:], *kwargs.values())
    if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
        indices = tree_leaves(args[1])
        return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
    return func in (torch.masked_select, torch.Tensor.masked_select, torch.unique)
