"""Conversions between the forms in which engines describe where the tokens of a batch are stored.

| form | tensors | used by |
|---|---|---|
| block table | `[R, max_blocks]` block ids | attnlib, vLLM, FlashAttention |
| CSR page lists | `indptr [R+1]`, `indices [P]`, `last_page_len [R]` | FlashInfer |
| token slots | `[R, max_seq_len]`, the slot of every position | SGLang (`req_to_token`) |
| read indices | `[S]` slots of all tokens in a row, `cu_seqlens [R+1]` | transformers, SGLang |
| write indices | `[T]` slots of the new tokens | transformers; the slot mapping (P4) |

R requests; slot = block * block_size + offset. All functions accept int32 and int64, run on the
device of their arguments and never synchronize with it. The sizes of ragged results are therefore
given by the caller or upper bounds, and the rest of a result is filled with -1. Values are checked
on a CPU, and elsewhere under ATTNLIB_VALIDATE, which synchronizes: lengths past a table, offsets
that decrease, and results that do not fit raise ContractError. Without checks, entries past the end
of a table read -1, and entries past the given size are left out.
"""

from __future__ import annotations

from attnlib.cache.page_lists import PageList, block_table_to_csr, csr_seq_lens, csr_to_block_table
from attnlib.cache.token_indices import (
    ReadIndices,
    read_indices_to_token_slots,
    token_slots_to_read_indices,
    token_slots_to_write_indices,
    write_indices_to_token_slots,
)
from attnlib.cache.token_slots import (
    block_table_to_token_slots,
    csr_to_token_slots,
    token_slots_to_block_table,
    token_slots_to_csr,
)

__all__ = [
    "PageList",
    "ReadIndices",
    "block_table_to_csr",
    "block_table_to_token_slots",
    "csr_seq_lens",
    "csr_to_block_table",
    "csr_to_token_slots",
    "read_indices_to_token_slots",
    "token_slots_to_block_table",
    "token_slots_to_csr",
    "token_slots_to_read_indices",
    "token_slots_to_write_indices",
    "write_indices_to_token_slots",
]
