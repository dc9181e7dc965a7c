"""Whether keys and values of a block, two tensors, or the elements of one overlap in memory."""

from __future__ import annotations

import torch

from attnlib.errors import ContractError

__all__ = [
    "blocks_overlap",
    "check_pair",
    "check_written",
    "elements_overlap",
    "same_memory",
    "tensors_overlap",
]


def blocks_overlap(key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether the keys and the values of a block have an element in common.

    Blocks with different ids may: views of one allocation in smaller blocks number the blocks of
    keys and of values alike, and a block table uses each for one of the two (`split_blocks`).

    Args:
        key_cache: `[B, N, Hkv, D]`.
        value_cache: `[B, N, Hkv, Dv]` of the same dtype. Views with different strides between
            blocks are not compared.
    """
    if key_cache.is_meta or not (key_cache.numel() and value_cache.numel()):
        return False
    if key_cache.untyped_storage().data_ptr() != value_cache.untyped_storage().data_ptr():
        return False
    if key_cache.stride(0) != value_cache.stride(0):
        return False
    distance = int(value_cache.storage_offset()) - int(key_cache.storage_offset())
    return _meet(_dimensions(key_cache), _dimensions(value_cache), distance)


def elements_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor are in the same memory, as in expanded tensors."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    for place, (stride, size) in enumerate(dimensions):
        inner = dimensions[place + 1 :]
        if size > 1 and stride <= _reach(inner):
            steps = range(stride, min(_reach(inner), stride * (size - 1)) + 1, stride or 1)
            if any(_meet(inner, inner, step) for step in steps):
                return True
    return False


def check_written(rule: str = "P1", /, **caches: torch.Tensor) -> None:
    """Whether each token of tensors that are written has memory of its own.

    Args:
        rule: that they must follow.
        caches: by the names of arguments.

    Raises:
        ContractError: tokens share memory.
    """
    for name, cache in caches.items():
        if elements_overlap(cache):
            raise ContractError(
                f"{name} has strides {cache.stride()} for shape {tuple(cache.shape)}, so that "
                "tokens share memory, and one would overwrite another: pass separate memory for "
                "each token",
                rule=rule,
            )


def check_pair(**caches: torch.Tensor) -> None:
    """Whether keys and values that are both written have memory of their own.

    Args:
        caches: those of keys and of values, `[B, N, Hkv, D]`, by the names of arguments.

    Raises:
        ContractError: they share memory, or tokens of one do.
    """
    if blocks_overlap(*caches.values()):
        raise ContractError(
            f"{' and '.join(caches)} share memory, so that new values would overwrite new keys: "
            "pass two caches",
            rule="P1",
        )
    check_written(**caches)


def tensors_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have a byte of memory in common, at whatever addresses they begin.

    Columns of one allocation, such as queries and keys of one projection, do not. Tensors with
    different strides between rows are compared by the ranges that they span.
    """
    if not (first.numel() and second.numel()):
        return False
    own, other = first.untyped_storage(), second.untyped_storage()
    start, of_other = own.data_ptr(), other.data_ptr()
    if start + own.nbytes() <= of_other or of_other + other.nbytes() <= start:
        return False  # most calls: bytes are compared only inside one allocation
    distance = second.data_ptr() - first.data_ptr()
    return _meet(_dense_dimensions(first), _dense_dimensions(second), distance)


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of equal rows are in the same places; flat and per-head views agree."""
    same = first.data_ptr() == second.data_ptr()
    return same and _dense_dimensions(first) == _dense_dimensions(second)


def _dense_dimensions(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(stride in bytes, size) of each dimension of more than one element, largest stride first, and
    of the bytes of an element. Dense dimensions are one, so that flat and per-head views agree."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    dimensions = sorted(zip(strides, tensor.shape, strict=True), reverse=True)
    found = list[tuple[int, int]]()
    for stride, count in (*(dim for dim in dimensions if dim[1] > 1), (1, size)):
        if found and found[-1][0] == stride * count:
            count *= found.pop()[1]
        found.append((stride, count))
    return found


def _dimensions(view: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of each dimension of a block, largest stride first."""
    return sorted(zip(view.stride()[1:], view.shape[1:], strict=True), reverse=True)


def _reach(dimensions: list[tuple[int, int]]) -> int:
    """The largest offset in a box of elements."""
    return sum(stride * (size - 1) for stride, size in dimensions)


def _meet(first: list[tuple[int, int]], second: list[tuple[int, int]], distance: int) -> bool:
    """Whether two boxes of elements, `distance` apart, have an element in common.

    Two dimensions with different strides are compared by the ranges that they span.
    """
    if not -_reach(second) <= distance <= _reach(first):
        return False
    if not first:
        return distance == 0
    (stride, size), (other_stride, other_size) = first[0], second[0]
    rest_first, rest_second = first[1:], second[1:]
    if stride != other_stride:
        return True
    if stride == 0:
        return _meet(rest_first, rest_second, distance)
    # Only differences of indices for which the inner dimensions can cover the rest.
    least = max(1 - other_size, -(-(distance - _reach(rest_first)) // stride))
    most = min(size - 1, (distance + _reach(rest_second)) // stride)
    return any(
        _meet(rest_first, rest_second, distance - step * stride) for step in range(least, most + 1)
    )
