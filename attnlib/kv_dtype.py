"""Names of the dtypes that a cache can store (M9)."""

from __future__ import annotations

import torch

from attnlib.errors import ContractError

__all__ = ["kv_cache_torch_dtype"]

_KV_DTYPES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_NAMES = ", ".join(("auto", *_KV_DTYPES))


def kv_cache_torch_dtype(kv_cache_dtype: str | torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a cache stores.

    Args:
        kv_cache_dtype: a dtype, a name, or "auto" for the dtype of the model.
        dtype: dtype of the model.

    Raises:
        ContractError: no cache can store this dtype.
    """
    if isinstance(kv_cache_dtype, torch.dtype):
        if kv_cache_dtype not in (*_KV_DTYPES.values(), dtype):
            raise ContractError(
                f"kv_cache_dtype={kv_cache_dtype} cannot be stored; use one of {_NAMES}"
            )
        return kv_cache_dtype
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype not in _KV_DTYPES:
        raise ContractError(f"kv_cache_dtype={kv_cache_dtype!r} is not known; use one of {_NAMES}")
    return _KV_DTYPES[kv_cache_dtype]
