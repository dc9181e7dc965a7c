"""FlashInfer's paged caches: views, page lists, and appending keys and values."""

from __future__ import annotations

from importlib import import_module

import torch

from attnlib.errors import ContractError, LayoutMismatchError

__all__ = [
    "append_paged_kv_cache",
    "cache_views",
    "check_layout",
    "get_batch_indices_positions",
    "get_seq_lens",
    "page_table",
]

PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_layout(kv_layout: str) -> None:
    """Raises:
    LayoutMismatchError: a layout that is neither NHD nor HND.
    """
    if kv_layout not in ("NHD", "HND"):
        raise LayoutMismatchError(f"kv_layout={kv_layout!r} must be 'NHD' or 'HND'")


def cache_views(paged_kv_cache: PagedCache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views `[pages, page_size, Hkv, D]` of a cache.

    Args:
        paged_kv_cache: `[pages, 2, page_size, Hkv, D]` (NHD), `[pages, 2, Hkv, page_size, D]`
            (HND), or a pair of 4-D tensors without the second dimension.
        kv_layout: "NHD" or "HND".

    Raises:
        ContractError: a cache of another shape.
    """
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
            raise ContractError(
                f"paged_kv_cache has shape {tuple(paged_kv_cache.shape)}; a single tensor must be "
                f"[pages, 2, ...] with 5 dimensions in the layout {kv_layout}"
            )
        key, value = paged_kv_cache.unbind(1)
    else:
        key, value = paged_kv_cache
        if key.dim() != 4 or value.dim() != 4:
            raise ContractError(
                f"paged_kv_cache has shapes {tuple(key.shape)} and {tuple(value.shape)}; a pair "
                f"must be 4-D tensors in the layout {kv_layout}"
            )
    if kv_layout == "HND":
        return key.transpose(1, 2), value.transpose(1, 2)
    return key, value


def page_table(
    indptr: torch.Tensor, indices: torch.Tensor, width: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The block table `[R, width]` int32 of page lists in CSR form, on their device without a sync.

    Args:
        indptr: `[R + 1]`, first page of each request in `indices`.
        indices: the pages of all requests.
        width: pages of the longest request, at least.
        out: written instead of a new tensor.
    """
    columns = torch.arange(width, device=indptr.device)
    places = indptr[:-1].long()[:, None] + columns
    inside = places < indptr[1:].long()[:, None]
    if indices.numel():
        pages = indices.long()[places.clamp(max=indices.numel() - 1)]
    else:
        pages = torch.zeros_like(places)
    table = torch.where(inside, pages, 0).to(torch.int32)
    return table if out is None else out.copy_(table)


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Sequence lengths of page lists in CSR form.

    Args:
        kv_indptr: `[R + 1]`.
        kv_last_page_len: `[R]`, tokens of the last page of each request.
        page_size: tokens per page.

    Returns:
        `[R]`; 0 for a request without pages.
    """
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)


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
    """
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
        ContractError: a cache of another shape, or rows that disagree.
        LayoutMismatchError: an unknown layout.
    """
    check_layout(kv_layout)
    key_cache, value_cache = cache_views(paged_kv_cache, kv_layout)
    rows = append_key.shape[0]
    if append_value.shape[0] != rows or batch_indices.shape != (rows,) != positions.shape:
        raise ContractError(
            f"append_key has {rows} rows, append_value {append_value.shape[0]}, batch_indices "
            f"{tuple(batch_indices.shape)} and positions {tuple(positions.shape)}; all must agree"
        )
    if not rows or not kv_indices.numel():
        return
    page_size = key_cache.shape[1]
    request, position = batch_indices.long(), positions.long()
    place = kv_indptr.long()[request.clamp(min=0)] + position.clamp(min=0) // page_size
    pages = kv_indices.long()[place.clamp(max=kv_indices.numel() - 1)]
    slots = pages * page_size + position.clamp(min=0) % page_size
    slots = slots.masked_fill((request < 0) | (position < 0), -1)
    counterpart = "triton" if key_cache.is_cuda else "torch"
    write_kv = import_module(f"attnlib.ops.{counterpart}.cache_write").write_kv
    write_kv(append_key, append_value, key_cache, value_cache, slots)
