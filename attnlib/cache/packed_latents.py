"""A cache of packed latents: 656 bytes per token (P14)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.cache.overlap import check_written
from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable
from attnlib.ops.dispatch import operation
from attnlib.ops.packed_latents import (
    BYTES,
    LATENT,
    check_batch,
    check_query,
    packed_views,
)
from attnlib.ops.params import AttentionParams
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["PackedLatentCache"]


@dataclass(frozen=True, eq=False)
class PackedLatentCache:
    """Latents of one layer: 512 float8 elements, 4 float32 scales, 64 bfloat16 elements per token.

    Attributes:
        data: `[B, N, 656]` uint8. The cache that vLLM allocates for `fp8_ds_mla`, and FlashMLA's
            `k_cache[:, :, 0]` viewed as uint8.

    Raises:
        ContractError: another dtype, shape or alignment, or tokens that share memory.
    """

    data: torch.Tensor

    def __post_init__(self) -> None:
        packed_views(self.data)
        check_written(data=self.data)

    @classmethod
    @explains_device
    @torch.inference_mode(False)  # writable in and outside of inference mode
    def allocate(
        cls, num_blocks: int, block_size: int, device: torch.device | str | None = None
    ) -> PackedLatentCache:
        """A zero-filled cache of `num_blocks` blocks of `block_size` tokens."""
        return cls(torch.zeros(num_blocks, block_size, BYTES, dtype=torch.uint8, device=device))

    @property
    def block_size(self) -> int:
        """Tokens per block (N)."""
        return self.data.shape[1]

    def write(self, latents: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Quantize new latents and write them to their slots (P4).

        Args:
            latents: `[T', 576]` with T' >= T. The scale of 128 elements is their largest magnitude
                divided by 448.
            slot_mapping: `[T]` int64; a negative slot writes nothing.

        Raises:
            ContractError: latents of another shape or dtype, fewer latents than slots, or, on a
                CPU and under ATTNLIB_VALIDATE, a slot past the cache. Nothing is written then.
        """
        operation("packed_latents", "write_packed_latents", latents)(
            latents, self.data, slot_mapping
        )

    def attend(
        self,
        query: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        params: AttentionParams,
        *,
        max_query_len: int,
        max_seq_len: int,
        lse: torch.Tensor | None = None,
        selection: KeySelection | None = None,
        selected: SelectedKeys | None = None,
    ) -> torch.Tensor:
        """Attention of absorbed queries over the cache (M12), of all visible keys or of selected
        ones (M11).

        Args:
            query: `[T, Hq, 576]`.
            block_table: `[R, M]` int32.
            query_start_loc: `[R + 1]` int32.
            seq_lens: `[R]` int32.
            params: the scale is that of the heads before absorption.
            max_query_len, max_seq_len: upper bounds of the batch.
            lse: `[T, Hq]` float32, written when given.
            selection, selected: the form of the lists and the lists; None for all keys.

        Returns:
            `[T, Hq, 512]`.

        Raises:
            ContractError: tensors of other shapes, dtypes or devices, or lists that do not fit the
                selection; on a CPU and under ATTNLIB_VALIDATE also blocks outside of the cache and
                offsets that decrease or end past the queries.
            UnsupportedConfigError: a feature that the Triton kernel does not have.
        """
        check_query(query)
        check_batch(query, self.data, block_table, query_start_loc, seq_lens, max_seq_len, lse)
        if (selection is None) != (selected is None):
            raise ContractError(
                "selection and selected belong together: pass the form of the lists and the lists, "
                "or neither",
                rule="M11",
            )
        if selection is not None and selected is not None:
            tokens = int(query_start_loc[-1]) if are_readable(query_start_loc) else 0
            selected.check(selection, query.shape[1], 1, seq_lens.shape[0], tokens, query.device)
        out = query.new_empty(*query.shape[:2], LATENT)
        operation("packed_latents", "packed_latent_attention", query)(
            query, self.data, block_table, query_start_loc, seq_lens, params,
            max_query_len=max_query_len, max_seq_len=max_seq_len, out=out, lse=lse,
            selection=selection, selected=selected,
        )  # fmt: skip
        return out
