"""The operations of torch that a GPU would launch."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LaunchedOperations"]


class LaunchedOperations(TorchDispatchMode):
    """Collects operations, but views and new tensors without values.

    Attributes:
        names: of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if not func.is_view and name != "aten::empty":
            self.names.append(name)
        return func(*args, **(kwargs or {}))
