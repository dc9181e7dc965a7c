"""FlashInfer's paged caches: views, and page lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.compat.flashinfer.arguments import check_tensors, integer
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.ops.addresses import are_readable, check_starts

__all__ = [
    "cache_views",
    "check_layout",
    "check_list",
    "get_seq_lens",
    "page_table",
]

PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_INTEGERS = (torch.int32, torch.int64)


def check_layout(kv_layout: str) -> None:
    """Raises:
    LayoutMismatchError: a layout that is neither NHD nor HND.
    """
    if kv_layout not in ("NHD", "HND"):
        raise LayoutMismatchError(f"kv_layout={kv_layout!r} must be 'NHD' or 'HND'")


def check_list(
    name: str, tensor: torch.Tensor, length: int | None = None, device: torch.device | None = None
) -> None:
    """Whether a list is a tensor `[n]` of int32 or int64.

    Args:
        name, tensor: the list.
        length: the n that it must have; None for any.
        device: where it must be; None for any.

    Raises:
        ContractError: it is not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ContractError(f"{name} is a {type(tensor).__name__}; it must be an int32 tensor [n]")
    if tensor.dim() != 1 or tensor.dtype not in _INTEGERS:
        raise ContractError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int32 or int64 with 1 "
            "dimension"
        )
    if length is not None and tensor.shape[0] != length:
        raise ContractError(f"{name} has {tensor.shape[0]} elements; it must have {length}")
    if device is not None and tensor.device != device:
        raise ContractError(f"{name} is on {tensor.device}; it must be on {device}")


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
        pair = tuple(paged_kv_cache) if isinstance(paged_kv_cache, Sequence) else ()
        if len(pair) != 2:
            raise ContractError(
                f"paged_kv_cache has {len(pair)} tensors ({type(paged_kv_cache).__name__}); pass "
                "one tensor, or those of keys and values"
            )
        key, value = pair
        check_tensors(paged_kv_cache=key)
        check_tensors(paged_kv_cache=value)
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
        kv_indptr: `[R + 1]` int32.
        kv_last_page_len: `[R]` int32, tokens of the last page of each request.
        page_size: tokens per page.

    Returns:
        `[R]`; 0 for a request without pages.

    Raises:
        ContractError: the lists disagree; on a CPU also offsets that decrease, and a last page that
            is empty or longer than a page.
    """
    check_list("kv_last_page_len", kv_last_page_len)
    check_list("kv_indptr", kv_indptr, kv_last_page_len.shape[0] + 1, kv_last_page_len.device)
    page_size = integer("page_size", page_size, 1)
    check_starts("kv_indptr", kv_indptr, None)
    pages = kv_indptr[1:] - kv_indptr[:-1]
    if are_readable(pages):
        _check_last_pages(pages, kv_last_page_len, page_size)
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)


def _check_last_pages(pages: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
    # A request without pages has no last page, and its length there is not read.
    wrong = (pages > 0) & ((last < 1) | (last > page_size))
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ContractError(
            f"last_page_len[{request}]={int(last[request])} must be from 1 to "
            f"page_size={page_size}: the last page of a request holds at least one token",
            rule="P3",
        )
