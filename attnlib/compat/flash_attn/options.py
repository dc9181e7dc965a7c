"""The scalar arguments of FlashAttention's functions: which are served, which refused and why."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.spec import AttentionSpec, AttentionType, MaskKind, Window

__all__ = [
    "FlashAttentionArgumentError", "Options", "argument_errors", "check_tensor", "integer",
    "last_stride_1", "refuse", "refuse_gradients", "slopes_of",
]  # fmt: skip


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
        if value is not neutral and (value is None or isinstance(value, torch.Tensor) or
                                     value != neutral):  # fmt: skip
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


class Options(NamedTuple):
    """How one call computes scores; equal options need equal layers.

    Attributes:
        scale: softmax scale.
        causal: the causal mask, aligned bottom-right.
        window: visible keys (before, after) the query's own; -1 is unbounded.
        softcap: 0 is none.
        chunk: positions per attention chunk, 0 is none.
        alibi: whether ALiBi slopes are given.
        lse: whether the LSE is returned.
    """

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    chunk: int
    alibi: bool
    lse: bool

    @classmethod
    def of(
        cls,
        head_size: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: Sequence[Any] | torch.Tensor,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        return_lse: bool,
        *,
        max_query_len: int,
        max_seq_len: int,
        chunk: int = 0,
    ) -> Options:
        """The options of a call. Masks that hide the same keys become equal: a causal mask bounds
        the window on the right, a single query is the last position, and a side that reaches every
        key is unbounded.

        Raises:
            FlashAttentionArgumentError: `window_size` is not a pair, or a number is out of range.
        """
        if len(window_size) != 2:
            raise FlashAttentionArgumentError(
                f"window_size={window_size!r} must be a pair (left, right), with -1 for unbounded"
            )
        left, right = (max(integer("window_size", side), -1) for side in window_size)
        scale = head_size**-0.5 if softmax_scale is None else float(softmax_scale)
        if left >= max_seq_len:
            left = -1
        if max_query_len == 1:
            causal = True
        if causal:
            right = 0
        elif right >= max_seq_len + max_query_len:  # the first queries may be before key 0
            right = -1
        cap = max(float(softcap), 0.0)
        has_alibi = alibi_slopes is not None
        chunk = integer("attention_chunk", chunk)
        return cls(scale, bool(causal), (left, right), cap, chunk, has_alibi, return_lse)

    def spec(
        self,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_sizes: tuple[int, int],
        block_size: int | None,
    ) -> AttentionSpec:
        """What a layer with these options needs.

        Args:
            dtype: of q and the cache.
            num_heads, num_kv_heads: query and KV heads.
            head_sizes: elements of one key head and of one value head.
            block_size: tokens per block; None for keys that are not paged.
        """
        left, right = (None if side < 0 else side for side in self.window)
        window = sliding_window = None
        if self.causal:
            sliding_window = None if left is None else left + 1
        elif left is not None or right is not None:
            window = Window(left, right)
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_sizes[0],
            head_size_v=head_sizes[1],
            dtype=dtype,
            block_size=block_size or 16,
            attn_type=AttentionType.DECODER if block_size else AttentionType.ENCODER_ONLY,
            mask_kind=MaskKind.CAUSAL if self.causal else MaskKind.BIDIRECTIONAL,
            sliding_window=sliding_window,
            window=window,
            logits_soft_cap=self.softcap or None,
            attention_chunk_size=self.chunk or None,
            has_alibi=self.alibi,
            needs_lse=self.lse,
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


def slopes_of(
    alibi_slopes: torch.Tensor | None, like: torch.Tensor, requests: int
) -> torch.Tensor | None:
    """ALiBi slopes as `[1, Hq]` if they are equal for all requests, else `[requests, Hq]`.

    Args:
        alibi_slopes: `[Hq]` or `[requests, Hq]` float32.
        like: the query, `[..., Hq, D]`.
        requests: requests in the batch.

    Raises:
        FlashAttentionArgumentError: another shape, dtype or device.
    """
    if alibi_slopes is None:
        return None
    heads, dims = like.shape[-2], alibi_slopes.dim()
    shape = f"[{heads}] or [{requests}, {heads}]"
    check_tensor("alibi_slopes", alibi_slopes, 2 if dims == 2 else 1, shape, like, torch.float32)
    if alibi_slopes.shape not in ((heads,), (requests, heads)):
        raise FlashAttentionArgumentError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; it must be {shape}"
        )
    if dims == 2 and requests > 1 and alibi_slopes.stride(0) != 0:
        return alibi_slopes.contiguous()
    return (alibi_slopes if dims == 1 else alibi_slopes[0]).contiguous()[None]
