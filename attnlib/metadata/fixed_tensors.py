"""Tensors by name that a plan has been made for."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["FixedTensors"]


class FixedTensors(dict[str, Tensor]):
    """A dictionary whose entries stay: plans hold the addresses of its tensors.

    Raises:
        ContractError: an entry is assigned or removed.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ContractError(
            f"the tensors {', '.join(self)} of a batch cannot be replaced one by one, because "
            "plans hold their addresses: assign metadata.score_tensors = "
            "{**metadata.score_tensors, name: tensor}, or copy new values into a tensor",
            rule="M10",
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FixedTensors, (dict(self),)
