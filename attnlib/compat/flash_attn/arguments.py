"""Checks of single arguments of FlashAttention's functions, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.layer.tensor_checks import has_tangent
from attnlib.ops.addresses import shortened

__all__ = [
    "FlashAttentionArgumentError",
    "argument_errors",
    "check_tensor",
    "flag",
    "integer",
    "last_stride_1",
    "number",
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
    """Refuse tensors that require a gradient while torch records gradients, or have a tangent.

    Raises:
        UnsupportedConfigError: attnlib has a forward pass only.
    """
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    requires = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if requires or has_tangent(*given):
        found = "requires a gradient" if requires else "has a tangent of forward-mode gradients"
        raise UnsupportedConfigError(
            f"q, k or v {found}, and attnlib has a forward pass only: call it under "
            "torch.no_grad() or torch.inference_mode(), or use FlashAttention for training",
            reasons=["gradients"],
        )


def flag(name: str, value: Any) -> bool:
    """An argument that is a flag.

    Raises:
        FlashAttentionArgumentError: it is neither true nor false, as a tensor of several elements.
    """
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise FlashAttentionArgumentError(
            f"{name}={shortened(value)} must be True or False: {error}"
        ) from None


def integer(name: str, value: Any, least: int | None = None) -> int:
    """An argument that is an integer; a tensor of one element is read.

    Raises:
        FlashAttentionArgumentError: it is none, or below `least`.
    """
    try:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except (RuntimeError, TypeError):
        raise FlashAttentionArgumentError(f"{name}={value!r} must be an integer") from None
    if least is not None and found < least:
        raise FlashAttentionArgumentError(f"{name}={found} must be at least {least}")
    return found


def number(name: str, value: Any) -> float:
    """An argument that is a number, or a tensor of one element, which is read.

    Raises:
        FlashAttentionArgumentError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise FlashAttentionArgumentError(f"{name}={shortened(value)} must be a number") from None


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
        FlashAttentionArgumentError: it is not a tensor, or has another number of dimensions,
            dtype or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise FlashAttentionArgumentError(
            f"{name} is a {type(tensor).__name__}; it must be a tensor {shape}"
        )
    if tensor.layout != torch.strided:
        raise FlashAttentionArgumentError(
            f"{name} has layout={tensor.layout}; it must be a dense tensor {shape}"
        )
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
    """The tensor, or a copy in memory as kernels read it: with a last stride of 1, as in
    FlashAttention, and without a negation that torch applies when it reads.

    Raises:
        FlashAttentionArgumentError: it is not a tensor, or one without dimensions.
    """
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or not tensor.dim() or tensor.layout != torch.strided:
        shown = "a tensor without dimensions or not dense" if is_tensor else shortened(tensor)
        raise FlashAttentionArgumentError(
            f"{shown} is given for q, k, v or block_table: pass a tensor"
        )
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()
