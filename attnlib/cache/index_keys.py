"""The paged cache of index keys, by which an indexer chooses the keys of attention (M14)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.cache.overlap import check_written
from attnlib.device import explains_device
from attnlib.errors import ContractError
from attnlib.ops.addresses import check_slot_values
from attnlib.ops.checks import check_slots
from attnlib.ops.dispatch import operation

__all__ = ["IndexKeyCache"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False)
class IndexKeyCache:
    """One index key per token, in the blocks of the layer's cache.

    Attributes:
        keys: `[B, N, Di]`, last stride 1; float8 holds key / scale.
        scales: `[B, N]` float32, one scale per token, exactly for float8.

    Raises:
        ContractError: shapes or dtypes of another form, or tokens that share memory.
    """

    keys: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        keys, scales = self.keys, self.scales
        if keys.dim() != 3 or not keys.is_floating_point() or keys.stride(2) != 1:
            raise ContractError(
                f"keys of an index cache are {keys.dtype} {tuple(keys.shape)} with strides "
                f"{keys.stride()}; they must be floating-point [blocks, block size, size] with "
                "last stride 1",
                rule="M14",
            )
        if (keys.dtype in _FP8) != (scales is not None):
            given = "missing" if scales is None else "given"
            raise ContractError(
                f"scales of an index cache are {given}, but its keys are {keys.dtype}: float8 keys "
                "have one scale per token, others none",
                rule="M14",
            )
        if scales is not None and (
            scales.shape != keys.shape[:2]
            or scales.dtype != torch.float32
            or scales.device != keys.device
        ):
            raise ContractError(
                f"scales of an index cache are {scales.dtype} {tuple(scales.shape)} on "
                f"{scales.device}; they must be torch.float32 {list(keys.shape[:2])} on "
                f"{keys.device}",
                rule="M14",
            )
        check_written(keys=keys, **({} if scales is None else {"scales": scales}))

    @classmethod
    @explains_device
    @torch.inference_mode(False)  # writable in and outside of inference mode
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> IndexKeyCache:
        """An empty cache.

        Args:
            num_blocks, block_size: those of the layer's cache (B, N).
            head_size: elements of an index key (Di).
            dtype: of the stored keys; float8 adds one scale per token.
            device: where to allocate.
        """
        keys = torch.zeros(num_blocks, block_size, head_size, dtype=dtype, device=device)
        scales = None
        if dtype in _FP8:
            scales = torch.zeros(num_blocks, block_size, dtype=torch.float32, device=device)
        return cls(keys, scales)

    @property
    def block_size(self) -> int:
        """Tokens per block (N)."""
        return self.keys.shape[1]

    def check_new(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Check the arguments of `write`.

        Raises:
            ContractError: keys of another size, dtype or device, fewer keys than slots, slots that
                are not int64, or, on a CPU and under ATTNLIB_VALIDATE, a slot past the cache.
        """
        size, device = self.keys.shape[2], self.keys.device
        if keys.dim() != 2 or keys.shape[1] != size or not keys.is_floating_point():
            raise ContractError(
                f"index keys are {keys.dtype} {tuple(keys.shape)}; they must be floating point "
                f"[tokens, {size}]",
                rule="M14",
            )
        check_slots(keys, keys, slot_mapping)
        for name, tensor in (("index keys", keys), ("slot_mapping", slot_mapping)):
            if tensor.device != device:
                raise ContractError(
                    f"{name} on {tensor.device}, the index cache on {device}: move one of them",
                    rule="M14",
                )
        check_slot_values(slot_mapping, self.keys.shape[0] * self.keys.shape[1])

    def write(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write new index keys to their slots (P4). No host sync.

        Args:
            keys: `[T', Di]` with T' >= T. For float8, the scale of a token is its largest
                magnitude, divided by the largest finite number of the dtype.
            slot_mapping: `[T]` int64; -1 writes nothing.

        Raises:
            ContractError: as `check_new`. Nothing is written then.
        """
        self.check_new(keys, slot_mapping)
        write = operation("cache_write", "write_kv", keys)
        stored = self.keys.unsqueeze(2)
        if self.scales is not None:
            keys = keys.float()
            largest = torch.finfo(self.keys.dtype).max
            scale = keys.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny * largest)
            scale = scale / largest
            keys = keys / scale[:, None]
            places = self.scales[:, :, None, None]
            rows = scale[:, None, None]
            write(rows, rows, places, places, slot_mapping)
        rows = keys[:, None]
        # Values that are a prefix of the keys are written with them (P10).
        write(rows, rows[..., :1], stored, stored[..., :1], slot_mapping)
