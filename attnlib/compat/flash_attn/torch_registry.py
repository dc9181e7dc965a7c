"""`scaled_dot_product_attention` of torch by attnlib, through torch's registry of FlashAttention
implementations (`torch.nn.attention.register_flash_attention_impl`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from attnlib.compat.flash_attn.arguments import refuse
from attnlib.compat.flash_attn.dense import flash_attn_func
from attnlib.compat.flash_attn.varlen import flash_attn_varlen_func
from attnlib.errors import BackendUnavailableError, UnsupportedConfigError

__all__ = ["register_flash_attention_impl"]

_DENSE = "_scaled_dot_product_flash_attention"


def register_flash_attention_impl(name: str = "attnlib") -> None:
    """Register attnlib as an implementation of FlashAttention in torch.

    `torch.nn.attention.activate_flash_attention_impl(name)` then replaces FlashAttention behind
    `torch.nn.functional.scaled_dot_product_attention` (where torch would choose it) and behind
    `torch.nn.attention.varlen`, on GPUs and for dense inputs also on the CPU.
    `restore_flash_attention_impl()` undoes it. Dropout is refused. Gradients are computed by
    torch's own kernel from attnlib's output and LSE.

    Args:
        name: the name to activate.

    Raises:
        BackendUnavailableError: this torch has no such registry.
    """
    import torch.nn.attention as attention

    register: Any = getattr(attention, "register_flash_attention_impl", None)
    if register is None:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: "
            "update torch, or call attnlib.compat.flash_attn_func"
        )
    register(name, register_fn=_activate)


class _Handle:
    """Keeps the replaced operators; the registry calls `remove` to restore torch's own."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Restore the operators."""
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._library = None


def _activate() -> _Handle:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # as above
    functions: dict[str, tuple[str, Callable[..., Any]]] = {}
    if torch.version.cuda or torch.version.hip:
        functions[_DENSE] = ("CUDA", _scaled_dot_product_flash_attention)
        functions["_flash_attention_forward"] = ("CUDA", _flash_attention_forward)
    if hasattr(torch.library, "get_kernel"):  # before torch 2.9 there is no way back to its kernel
        functions[f"{_DENSE}_for_cpu"] = ("CPU", _cpu_operator())
    for operator, (key, function) in functions.items():
        library.impl(operator, function, key)  # type: ignore[no-untyped-call]  # as above
    return _Handle(library)


def _cpu_operator() -> Callable[..., Any]:
    """The operator on a CPU. Calls with a mask, which FlashAttention does not have, and calls of
    the torch backend itself go to torch's kernel."""
    own = torch.library.get_kernel(f"aten::{_DENSE}_for_cpu", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    inside = threading.local()

    def operator(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        if attn_mask is not None or getattr(inside, "attnlib", False):
            return own.call_boxed(
                keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        inside.attnlib = True
        try:
            return _attend(query, key, value, dropout_p, is_causal, False, scale)
        finally:
            inside.attnlib = False

    return operator


def _scaled_dot_product_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The operator on a GPU; tensors are `[B, H, S, D]`."""
    output, lse = _attend(query, key, value, dropout_p, is_causal, return_debug_mask, scale)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return (
        output,
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        state,
        state.new_zeros(()),
        query.new_empty(0),
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of `[B, H, S, D]` tensors. Torch aligns its causal mask at the first key."""
    _refuse_debug_mask(return_debug_mask)
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedConfigError(
            f"is_causal with {query.shape[2]} queries and {key.shape[2]} keys: torch aligns its "
            "mask at the first key, FlashAttention at the last one; pass equal lengths",
            reasons=["is_causal"],
        )
    output, lse, _ = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p,
        scale,
        is_causal,
        return_attn_probs=True,
    )
    return output.transpose(1, 2), lse


def _flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """The operator behind `torch.nn.attention.varlen`; tensors as in FlashAttention's functions."""
    _refuse_debug_mask(return_debug_mask)
    sides = (-1 if side is None else side for side in (window_size_left, window_size_right))
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": tuple(sides),
        "alibi_slopes": alibi_slopes,
        "return_attn_probs": True,
    }
    if cum_seq_q is None:
        refuse(seqused_k=(seqused_k, None, "dense keys have one length"))
        output, lse, _ = flash_attn_func(query, key, value, **options)
    else:
        output, lse, _ = flash_attn_varlen_func(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            seqused_k=seqused_k,
            block_table=block_table,
            **options,
        )
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return output, lse, state, state.new_zeros(()), query.new_empty(0)


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    refuse(return_debug_mask=(return_debug_mask, False, "attention weights are not computed"))
