"""Checks of the tensors of a call that its signature does not decide: their types and addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attnlib.cache.overlap import same_memory, tensors_overlap
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.ops.checks import check_writable

__all__ = [
    "check_output_memory",
    "check_return_lse",
    "check_tensor_types",
    "has_tangent",
    "refuse_in_place",
    "refuse_negated",
    "refuse_types",
]


def check_tensor_types(query: object, key: object, value: object, output: object = None) -> None:
    """Whether query, key, value and output are tensors, or None.

    Raises:
        ContractError: one is of another type.
    """
    tensors = (("query", query), ("key", key), ("value", value), ("output", output))
    for name, given in tensors:
        if not isinstance(given, torch.Tensor) and (given is not None or name == "query"):
            raise _type_error(name, given)


def check_return_lse(return_lse: object) -> None:
    """Whether `return_lse` is a flag, and not the output, which other layers take in its place.

    Raises:
        ContractError: it is of another type.
    """
    if not isinstance(return_lse, int | None):
        raise ContractError(
            f"return_lse is a {type(return_lse).__name__}; it must be True or False: pass a tensor "
            "to write to as output=..."
        )


def _type_error(name: str, given: object) -> ContractError:
    return ContractError(
        f"{name} is a {type(given).__name__}; it must be a torch.Tensor: convert it with "
        "torch.as_tensor"
    )


def refuse_types(inputs: Mapping[str, object], types: Sequence[Any]) -> None:
    """Refuse inputs of a state layer of other types than `types` has for each.

    Raises:
        ContractError: names the first one.
    """
    for (name, given), wanted in zip(inputs.items(), types, strict=False):
        if isinstance(given, wanted):
            continue
        if isinstance(wanted, type) and wanted is not torch.Tensor:
            raise ContractError(f"{name} is a {type(given).__name__}; pass a {wanted.__name__}")
        if given is None:
            raise ContractError(
                f"{name} of a state layer cannot be None: pass the rows of the batch's tokens",
                rule="T2",
            )
        raise _type_error(name, given)


def refuse_in_place(output: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Refuse an output in the memory of an input of which later rows are read. Plans do not depend
    on addresses.

    Raises:
        ContractError: they have memory in common, or the output is not a tensor or, outside of
            inference mode, was made in it.
    """
    if not isinstance(output, torch.Tensor):
        raise _type_error("output", output)
    if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
        check_writable(output=output)
    start = output.data_ptr()
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        distance = tensor.data_ptr() - start
        first = output if distance > 0 else tensor
        if first.is_contiguous() and first.nbytes <= abs(distance):
            continue  # most calls: one ends before the other begins
        if tensors_overlap(output, tensor):
            same = tensor.data_ptr() == output.data_ptr()
            raise ContractError(
                f"output is {'' if same else 'in the memory of '}{name}, which is read after rows "
                "of the output are written: pass another tensor, or None"
            )


def check_output_memory(
    query: torch.Tensor, cache: PagedKVCache | None, output: torch.Tensor
) -> None:
    """Whether an output is apart from the query, or exactly in its place, and from the cache.

    Raises:
        ContractError: it is not.
    """
    refuse_in_place(output, query=None if same_memory(output, query) else query)
    views = () if cache is None else (cache.key_cache, cache.value_cache)
    if any(tensors_overlap(output, view) for view in views):
        raise ContractError(
            "output is in the memory of the cache: pass another tensor, or None", rule="P9"
        )


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether one carries a tangent of forward-mode gradients, which kernels would lose."""
    if forward_ad._current_level < 0:
        return False
    given = (tensor for tensor in tensors if tensor is not None)
    return any(dual.tangent is not None for dual in map(forward_ad.unpack_dual, given))


def refuse_negated(name: str, tensor: torch.Tensor) -> None:
    """Refuse a view of which kernels would read other numbers than torch.

    Raises:
        ContractError: torch negates it when it reads.
    """
    if tensor.is_neg():
        raise ContractError(
            f"{name} is a view that torch negates when it is read, such as the imaginary part of a "
            "conjugate, which kernels cannot see: pass its resolve_neg()",
            rule="P9",
        )
