"""Page lists in CSR form, which `plan` takes: checked, and as a block table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.compat.flashinfer.arguments import integer
from attnlib.compat.flashinfer.page import check_list, get_seq_lens
from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable, check_starts

__all__ = ["PageLists"]


class PageLists(NamedTuple):
    """The requests of a batch.

    Attributes:
        query_starts: `[R + 1]` int32 on the host, first query of each request.
        page_starts: `[R + 1]` int32 on the host, first page of each request in `pages`.
        pages: int32, the pages of all requests, where the caller has them.
        lengths: `[R]` int32 on the host, keys of each request.
        highest_page: the largest page, if the host may read the pages; else None.
    """

    query_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    highest_page: int | None

    @classmethod
    def of(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
    ) -> PageLists:
        """The lists of a plan. Reads all but `kv_indices` on the host, as FlashInfer does; those
        are read on a CPU, and elsewhere under ATTNLIB_VALIDATE.

        Raises:
            ContractError: a list of another shape or dtype, offsets that decrease or exceed the
                pages, a last page that is empty or longer than a page, or a negative page.
        """
        page_size = integer("page_size", page_size, 1)
        check_list("last_page_len", last_page_len)
        requests = last_page_len.shape[0]
        for name, indptr in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            check_list(name, indptr)
            if indptr.shape != (requests + 1,):
                raise ContractError(
                    f"{name} has shape {tuple(indptr.shape)}, but last_page_len has {requests} "
                    f"requests: indptr tensors must be [{requests + 1}]"
                )
        check_list("kv_indices", kv_indices)
        starts, ends, last = (
            x.to("cpu", torch.int64) for x in (qo_indptr, kv_indptr, last_page_len)
        )
        check_starts("qo_indptr", starts, None)
        check_starts("kv_indptr", ends, kv_indices.shape[0])
        highest = _highest_page(kv_indices[: int(ends[-1])])
        lengths = get_seq_lens(ends, last, page_size)
        if requests and int(lengths.max()) > 2**31 - 1:
            raise ContractError(f"a request has {int(lengths.max())} keys; the limit is 2^31 - 1")
        host = (x.to(torch.int32) for x in (starts, ends, lengths))
        query_starts, page_starts, seq_lens = host
        return cls(query_starts, page_starts, kv_indices, seq_lens, highest)

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """Queries of all requests."""
        return int(self.query_starts[-1])

    @property
    def longest_query(self) -> int:
        """Most queries of a request."""
        return int(self.query_starts.diff().max()) if self.num_reqs else 0

    @property
    def longest_row(self) -> int:
        """Most pages of a request, at least 1."""
        return max(int(self.page_starts.diff().max()), 1) if self.num_reqs else 1

    def check_pages(self, num_pages: int) -> None:
        """Whether all pages are in a cache.

        Raises:
            ContractError: the largest one is not.
        """
        if self.highest_page is not None and self.highest_page >= num_pages:
            raise ContractError(
                f"kv_indices of the plan name page {self.highest_page}, but the cache has "
                f"{num_pages} pages (0 to {num_pages - 1})",
                rule="P3",
            )


def _highest_page(pages: torch.Tensor) -> int | None:
    if not are_readable(pages):
        return None
    if not pages.numel():
        return -1
    least, most = (int(x) for x in pages.aminmax())
    if least < 0:
        raise ContractError(
            f"kv_indices[{int(pages.argmin())}]={least} must not be negative", rule="P3"
        )
    return most
