"""Checks of single arguments of FlashAttention's functions, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnlib.errors import ContractError, UnsupportedConfigError

__all__ = [
    "FlashAttentionArgumentError",
    "argument_errors",
    "check_tensor",
    "integer",
    "last_stride_1",
    "refuse",
    "refuse_gradients",
]


class FlashAttentionArgumentError(ContractError, RuntimeError):
    """An argument that FlashAttention's functions do not accept either. It is a RuntimeError too,
    because FlashAttention raises RuntimeErrors."""


def refuse(**arguments: tuple[object, object, str]) -> None:
    """Refuse arguments that attnlib does not serve.

    Args:
        arguments: name=(value, the value without effect, why any other one is refused).

    Raises:
        UnsupportedConfigError: an argument has another value; the message has the reason.
    """
    for name, (value, neutral, reason) in arguments.items():
        if value is not neutral and (
            value is None or isinstance(value, torch.Tensor) or value != neutral
        ):
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedConfigError(f"{name}={shown}: {reason}", reasons=[name])


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Refuse tensors that require a gradient while torch records gradients.

    Raises:
        UnsupportedConfigError: attnlib has a forward pass only.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedConfigError(
            "q, k or v requires a gradient, and attnlib has a forward pass only: call it under "
            "torch.no_grad() or torch.inference_mode(), or use FlashAttention for training",
            reasons=["gradients"],
        )


def integer(name: str, value: Any, least: int | None = None) -> int:
    """An argument that is an integer; a tensor of one element is read.

    Raises:
        FlashAttentionArgumentError: it is none, or below `least`.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise FlashAttentionArgumentError(f"{name}={value!r} must be an integer") from None
    if least is not None and found < least:
        raise FlashAttentionArgumentError(f"{name}={found} must be at least {least}")
    return found


@contextmanager
def argument_errors() -> Iterator[None]:
    """Raise the ContractErrors of the checks inside as FlashAttentionArgumentErrors."""
    try:
        yield
    except FlashAttentionArgumentError:
        raise
    except ContractError as error:
        raise FlashAttentionArgumentError(str(error)) from None


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dims: int,
    shape: str,
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Check the number of dimensions, the dtype and the device of an argument.

    Args:
        name, tensor: the argument.
        dims, shape: how many dimensions it has, and their names for the message.
        like: the query; `tensor` is on its device and, unless `dtype` is given, has its dtype.
        dtype: the dtype that it must have.

    Raises:
        FlashAttentionArgumentError: it has another number of dimensions, dtype or device.
    """
    if tensor.dim() != dims:
        raise FlashAttentionArgumentError(
            f"{name} has shape {tuple(tensor.shape)}; it must be {shape}"
        )
    if tensor.dtype != (dtype or like.dtype):
        raise FlashAttentionArgumentError(
            f"{name} is {tensor.dtype}; it must be {dtype or like.dtype}"
            + ("" if dtype else ", like q")
        )
    if tensor.device != like.device:
        raise FlashAttentionArgumentError(
            f"{name} is on {tensor.device}, q on {like.device}: all tensors of a call must be on "
            "one device"
        )


def last_stride_1(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy if its last stride is not 1, as in FlashAttention."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()
