"""Checks of the tensors of a call that its signature does not decide: their types and addresses."""

from __future__ import annotations

import torch

from attnlib.errors import ContractError

__all__ = ["check_tensor_types", "refuse_in_place"]


def check_tensor_types(query: object, key: object, value: object, output: object = None) -> None:
    """Whether query, key, value and output are tensors, or None.

    Raises:
        ContractError: one is of another type.
    """
    tensors = (("query", query), ("key", key), ("value", value), ("output", output))
    for name, given in tensors:
        if not isinstance(given, torch.Tensor) and (given is not None or name == "query"):
            raise ContractError(
                f"{name} is a {type(given).__name__}; it must be a torch.Tensor: convert it with "
                "torch.as_tensor"
            )


def refuse_in_place(output: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Refuse an output that is an input of which later rows are read. Plans do not depend on
    addresses.

    Raises:
        ContractError: they begin at one address.
    """
    address = output.data_ptr()
    for name, tensor in inputs.items():
        if tensor is not None and tensor.data_ptr() == address and tensor.numel():
            raise ContractError(
                f"output is {name}, which is read after rows of the output are written: pass "
                "another tensor, or None"
            )
