"""`context_attention_fwd` of vLLM's Triton prefill: attention over unpaged keys and values.

Differences from `varlen_prefill`, all as in vLLM's function: sequences may have gaps between them
and any order; rows of no sequence keep their content (M6 would clear them); the softmax scale and
causality have defaults; the window counts the distance to the query and 0 means no window (M2
counts visible keys).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable, check_lengths
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams

__all__ = ["context_attention_fwd", "get_block_size"]


def context_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    b_start_loc: Tensor,
    b_seq_len: Tensor,
    max_input_len: int,
    is_causal: bool = True,
    softmax_scale: float | None = None,
    sliding_window_q: int | None = None,
    sliding_window_k: int | None = None,
) -> None:
    """Attention within each sequence; on a GPU without a host sync.

    Args:
        q: `[T, Hq, D]`.
        k: `[Tk, Hkv, D]`; row i holds the key of query i.
        v: `[Tk, Hkv, Dv]`, likewise.
        o: `[To, Hq, Dv]`, written; rows of no sequence keep their content.
        b_start_loc: `[R]`, the first token of each sequence, with gaps and in any order. Further
            entries, as the total at the end of cumulative lengths, are not read.
        b_seq_len: `[R]`, tokens of each sequence.
        max_input_len: upper bound of the sequence lengths.
        is_causal: whether a token sees no later ones.
        softmax_scale: factor of q . k; None means 1 / sqrt(D).
        sliding_window_q: how far before its own position a token sees; None or 0 is unbounded.
        sliding_window_k: how far after its own position a token sees; None or 0 is unbounded.

    Raises:
        ContractError: tensors whose shapes do not fit each other, or, on a CPU and under
            ATTNLIB_VALIDATE, sequences outside of the tokens or longer than `max_input_len`.
    """
    tokens = _rows_of_all(q, k, v, o)
    q, k, v, o = (x[:tokens] if x.shape[0] > tokens else x for x in (q, k, v, o))
    head_size, num_seqs = q.shape[2], b_seq_len.numel()
    if b_start_loc.dim() != 1 or b_seq_len.dim() != 1 or b_start_loc.shape[0] < num_seqs:
        raise ContractError(
            f"b_start_loc {tuple(b_start_loc.shape)} and b_seq_len {tuple(b_seq_len.shape)} must "
            "have one element per sequence, [R]"
        )
    b_start_loc = b_start_loc[:num_seqs]
    _check_sequences(b_start_loc, b_seq_len, tokens, max_input_len)
    params = AttentionParams(
        scale=head_size**-0.5 if softmax_scale is None else softmax_scale,
        causal=is_causal,
        window=(_side(sliding_window_q), _side(sliding_window_k)),
    )
    operation("context_attention", "context_attention", q)(
        q, k, v, b_start_loc, b_seq_len, params, max_seq_len=max_input_len, out=o
    )


def _rows_of_all(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> int:
    """The rows that queries, keys, values and outputs all have.

    Raises:
        ContractError: heads or head sizes that do not fit each other.
    """
    if (
        not q.dim() == k.dim() == v.dim() == o.dim() == 3
        or k.shape[1] != v.shape[1]
        or k.shape[2] != q.shape[2]
        or o.shape[1:] != (q.shape[1], v.shape[2])
        or q.shape[1] % max(1, k.shape[1])
    ):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, o {tuple(o.shape)}"
        raise ContractError(
            f"{shapes}: they must be [T, Hq, D], [T, Hkv, D], [T, Hkv, Dv] and [T, Hq, Dv], with "
            "Hq a multiple of Hkv"
        )
    return min(x.shape[0] for x in (q, k, v, o))


def _check_sequences(starts: Tensor, lengths: Tensor, tokens: int, longest: int) -> None:
    """Whether every sequence is inside the tokens and its bound."""
    if starts.is_floating_point() or lengths.is_floating_point():
        raise ContractError(
            f"b_start_loc is {starts.dtype} and b_seq_len {lengths.dtype}; both must be integers"
        )
    check_lengths("b_seq_len", lengths, longest, "max_input_len")
    check_lengths("b_start_loc", starts, tokens, "the tokens")
    if are_readable(starts):
        ends = starts + lengths
        check_lengths("b_start_loc + b_seq_len", ends, tokens, "the tokens")


def get_block_size(dtype: torch.dtype) -> int:
    """The tile size of vLLM's kernel for a dtype, for code that pads by it.

    The kernels of attnlib choose their tiles from tables and need no padding.

    Returns:
        32 for float32; else 128 on a GPU of compute capability 8.0 or later, and 64 elsewhere.
    """
    if dtype == torch.float32:
        return 32
    recent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return 128 if recent else 64


def _side(distance: int | None) -> int:
    """A side of the window in the form of `AttentionParams`."""
    return distance if distance is not None and distance > 0 else -1
