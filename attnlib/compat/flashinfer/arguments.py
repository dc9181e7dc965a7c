"""Arguments of FlashInfer's wrappers that attnlib does not serve, and dtypes by name."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.addresses import as_count, shortened

__all__ = [
    "REASONS",
    "check_neutral",
    "check_tensors",
    "flag",
    "integer",
    "number",
    "torch_dtype",
    "warn_positional",
]

_INT32 = 2**31 - 1
REASONS = {
    "pos_encoding_mode": "attnlib does not rotate or bias keys by position inside the kernels: "
    "rotate q and the keys before they are cached",
    "custom_mask": "a mask over cached keys is not implemented; trees of new tokens have "
    "CommonAttentionMetadata.query_bias",
    "packed_custom_mask": "a mask over cached keys is not implemented; trees of new tokens have "
    "CommonAttentionMetadata.query_bias",
    "jit_args": "attention variants in CUDA C++ are FlashInfer's own",
    "jit_kwargs": "attention variants in CUDA C++ are FlashInfer's own",
    "window_right": "the wrapper's window has no right side but the causal mask",
    "prefix_len_ptr": "scoring of several items is not implemented",
    "token_pos_in_items_ptr": "scoring of several items is not implemented",
    "max_item_len_ptr": "scoring of several items is not implemented",
    "sinks": "the wrapper takes no sinks: use attnlib.Attention(spec, sinks=...)",
    "kv_cache_sf": "caches of 4-bit elements are not implemented",
    "skip_softmax_threshold_scale_factor": "attnlib skips no keys",
    "o_data_type": "the output has the dtype of q",
    "args": "additional arguments belong to attention variants in CUDA C++",
}
"""Why an argument is refused, by its name."""


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by name or itself.

    Raises:
        ContractError: no dtype of torch has this name.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ContractError(f"dtype {dtype!r} is not a dtype of torch: pass for example 'float16'")
    return found


def check_tensors(**tensors: Any) -> None:
    """Whether arguments are dense tensors.

    Raises:
        ContractError: names the first that is none.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
        if tensor.layout != torch.strided:
            raise ContractError(f"{name} has layout={tensor.layout}; it must be a dense tensor")


def flag(name: str, value: Any) -> bool:
    """An argument that is a flag.

    Raises:
        ContractError: it is neither true nor false, as a tensor of several elements.
    """
    try:
        return bool(value)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ContractError(f"{name}={shortened(value)} must be True or False: {error}") from None


def integer(name: str, value: Any, least: int) -> int:
    """An argument that is an integer of 32 bits.

    Raises:
        ContractError: it is none, or below `least`.
    """
    found = as_count(name, value, least)
    if found > _INT32:
        raise ContractError(f"{name}={found} must be at most {_INT32}")
    return found


def number(name: str, value: Any) -> float:
    """An argument that is a number, or a tensor of one element, which is read.

    Raises:
        ContractError: it is none.
    """
    try:
        return float(value)
    except (NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError):
        raise ContractError(f"{name}={shortened(value)} must be a number") from None


def check_neutral(**arguments: Any) -> None:
    """Refuse arguments that attnlib does not serve.

    Args:
        arguments: their values; None, 0, False, "NONE" and () have no effect.

    Raises:
        UnsupportedConfigError: an argument has another value; the message has the reason.
    """
    for name, value in arguments.items():
        neutral = value is None or (
            not isinstance(value, torch.Tensor) and value in (0, False, "NONE", ())
        )
        if not neutral:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedConfigError(f"{name}={shown}: {REASONS[name]}", reasons=[name])


def warn_positional(name: str) -> None:
    """Warn that optional arguments of `plan` were passed by position, as FlashInfer does."""
    warnings.warn(
        f"optional arguments of {name}.plan by position are deprecated in FlashInfer: pass them by "
        "keyword",
        DeprecationWarning,
        stacklevel=3,
    )
