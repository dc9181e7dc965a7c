"""Appending keys and values to a paged cache, as FlashInfer's functions do."""

from __future__ import annotations

from importlib import import_module

import torch

from attnlib.cache.overlap import check_pair
from attnlib.compat.flashinfer.arguments import check_tensors, integer
from attnlib.compat.flashinfer.page import PagedCache, cache_views, check_layout, check_list
from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable, check_starts

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions"]


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each appended token, on the device without a sync.

    Args:
        append_indptr: `[R + 1]` int32, first new token of each request.
        seq_lens: `[R]` int32, lengths with the new tokens.
        nnz: rows of the result.

    Returns:
        `batch_indices` and `positions`, `[nnz]` int32; -1 for rows past the last new token.

    Raises:
        ContractError: the lists disagree; on a CPU also offsets that decrease or exceed `nnz`, and
            a length below the new tokens of its request.
    """
    check_list("seq_lens", seq_lens)
    check_list("append_indptr", append_indptr, seq_lens.shape[0] + 1, seq_lens.device)
    nnz = integer("nnz", nnz, 0)
    check_starts("append_indptr", append_indptr, nnz)
    _check_lengths(append_indptr, seq_lens)
    tokens = torch.arange(nnz, device=append_indptr.device)
    if not seq_lens.numel():
        nothing = torch.full_like(tokens, -1, dtype=torch.int32)
        return nothing, nothing.clone()
    request = torch.searchsorted(append_indptr[1:].long().contiguous(), tokens, right=True)
    outside = request >= seq_lens.shape[0]
    request = request.clamp(max=seq_lens.shape[0] - 1)
    positions = seq_lens[request] - append_indptr[request + 1] + tokens
    found = (x.masked_fill(outside, -1).to(torch.int32) for x in (request, positions))
    batch_indices, of_request = found
    return batch_indices, of_request


def _check_lengths(append_indptr: torch.Tensor, seq_lens: torch.Tensor) -> None:
    if not are_readable(seq_lens):
        return
    wrong = seq_lens < append_indptr.diff()
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ContractError(
            f"seq_lens[{request}]={int(seq_lens[request])} is below the "
            f"{int(append_indptr.diff()[request])} new tokens of the request: lengths count them",
            rule="M1",
        )


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values to a paged cache. No host sync.

    Args:
        append_key, append_value: `[nnz, Hkv, D]`.
        batch_indices, positions: `[nnz]`, request and position of each row; rows with a negative
            request or position are not written.
        paged_kv_cache: as in the wrappers' `run`.
        kv_indices, kv_indptr: page lists that have room for the new tokens.
        kv_last_page_len: not read: positions are given.
        kv_layout: "NHD" or "HND".

    Raises:
        ContractError: a cache, rows or lists of another shape, dtype or device. On a CPU, and under
            ATTNLIB_VALIDATE, also a request, position or page that does not exist. Nothing is
            written then. A GPU does not write tokens past the pages of their request.
        LayoutMismatchError: an unknown layout.
    """
    check_layout(kv_layout)
    check_tensors(append_key=append_key, append_value=append_value)
    key_cache, value_cache = cache_views(paged_kv_cache, kv_layout)
    _check_rows(append_key, append_value, key_cache, value_cache)
    check_pair(key_cache=key_cache, value_cache=value_cache)
    rows, device = append_key.shape[0], key_cache.device
    check_list("batch_indices", batch_indices, rows, device)
    check_list("positions", positions, rows, device)
    check_list("kv_indices", kv_indices, None, device)
    check_list("kv_indptr", kv_indptr, None, device)
    if not kv_indptr.shape[0]:
        raise ContractError("kv_indptr is empty; it must have one element more than requests")
    check_starts("kv_indptr", kv_indptr, kv_indices.shape[0])
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, key_cache)
    if slots is None:
        return
    counterpart = "triton" if key_cache.is_cuda else "torch"
    write_kv = import_module(f"attnlib.ops.{counterpart}.cache_write").write_kv
    new = append_key.resolve_neg(), append_value.resolve_neg()  # kernels read memory as it is
    write_kv(*new, key_cache, value_cache, slots)


def _check_rows(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise ContractError(
            f"the caches of keys and values are {key_cache.dtype} {tuple(key_cache.shape)} and "
            f"{value_cache.dtype} {tuple(value_cache.shape)} as [pages, page_size, heads, "
            "head_dim]; they must agree in all but head_dim",
            rule="P1",
        )
    rows = append_key.shape[0] if append_key.dim() else 0
    for name, new, cache in (
        ("append_key", append_key, key_cache),
        ("append_value", append_value, value_cache),
    ):
        if new.shape != (rows, *cache.shape[2:]) or not new.is_floating_point():
            raise ContractError(
                f"{name} is {new.dtype} {tuple(new.shape)}; it must be floating point "
                f"[{rows}, {cache.shape[2]}, {cache.shape[3]}], like the cache and append_key",
                rule="P4",
            )
        if new.device != cache.device:
            raise ContractError(f"{name} is on {new.device}, the cache on {cache.device}")


def _slots(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    key_cache: torch.Tensor,
) -> torch.Tensor | None:
    """The slot of each row, -1 for rows that are not written; None if there is none to write."""
    page_size, requests = key_cache.shape[1], indptr.shape[0] - 1
    request, position = batch_indices.long(), positions.long()
    skipped = (request < 0) | (position < 0)
    if are_readable(request) and bool((~skipped & (request >= requests)).any()):
        row = int((request >= requests).int().argmax())
        raise ContractError(
            f"batch_indices[{row}]={int(request[row])} is not a request: kv_indptr describes "
            f"{requests}"
        )
    if not request.numel() or not indices.numel() or not requests or not page_size:
        if are_readable(skipped) and not bool(skipped.all()):
            raise ContractError("kv_indices and kv_indptr have no page for the new tokens")
        return None
    request = request.clamp(0, requests - 1)
    place = indptr.long()[request] + position.clamp(min=0) // page_size
    outside = ~skipped & (place >= indptr.long()[request + 1])
    pages = indices.long()[place.clamp(0, indices.numel() - 1)]
    invalid = ~skipped & ((pages < 0) | (pages >= key_cache.shape[0]))
    for wrong, what in (
        (outside, "is past the pages of its request in kv_indptr"),
        (invalid, f"is in a page that the cache of {key_cache.shape[0]} pages does not have"),
    ):
        if are_readable(wrong) and bool(wrong.any()):
            row = int(wrong.int().argmax())
            raise ContractError(
                f"positions[{row}]={int(positions[row])} of request {int(request[row])} {what}",
                rule="P3",
            )
    slots = pages * page_size + position.clamp(min=0) % page_size
    return slots.masked_fill(skipped | outside | invalid, -1)
