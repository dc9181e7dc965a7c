"""Checks of latent attention: the sizes of a layer, and the tensors of its calls."""

from __future__ import annotations

from torch import Tensor

from attnlib.cache.overlap import elements_overlap
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer.tensor_checks import check_output_memory
from attnlib.spec import AttentionSpec

__all__ = ["check_sizes", "check_tensors"]


def check_tensors(
    spec: AttentionSpec,
    sizes: tuple[int, int],
    query: Tensor,
    latent: Tensor,
    cache: PagedKVCache,
    output: Tensor | None,
) -> None:
    """Shapes, dtypes and memory of a call.

    Args:
        spec: of the layer.
        sizes: elements of a key without its rotary part, and of a value.
        query, latent, cache, output: as in `LatentAttention.forward`.

    Raises:
        ContractError: the message names the tensor, what it is and what it must be.
    """
    rotary, tokens = spec.head_size - spec.head_size_v, query.shape[0]
    for name, tensor, shape in (
        ("query", query, (spec.num_heads, sizes[0] + rotary)),
        ("latent", latent, (spec.head_size,)),
        ("output", output, (spec.num_heads, sizes[1])),
    ):
        if tensor is None:
            continue
        if tensor.shape != (tokens, *shape):
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [tokens={tokens}, "
                f"{', '.join(map(str, shape))}]",
                rule="M12",
            )
        if tensor.dtype != spec.dtype:
            raise ContractError(f"{name} is {tensor.dtype}, the spec says {spec.dtype}: convert it")
    if output is None:
        return
    if output.device != query.device or output.stride(-1) != 1 or elements_overlap(output):
        raise ContractError(
            f"output is on {output.device} with strides {output.stride()}; it must be on "
            f"{query.device}, with last stride 1 and separate memory for each row: pass such a "
            "tensor, or None for a new one",
            rule="P9",
        )
    known = cache if isinstance(cache, PagedKVCache) else None  # its type is checked later
    check_output_memory(query, known, output)


def check_sizes(
    spec: AttentionSpec, projection: Tensor, key_size: int, context_tokens: int
) -> None:
    """Whether the weights of a layer fit its spec. Arguments as of `LatentAttention`.

    Raises:
        ContractError: they do not.
    """
    if not spec.use_mla:
        raise ContractError("spec has use_mla=False; latent attention needs a latent cache")
    if (
        projection.dim() != 3
        or projection.shape[0] != spec.num_heads
        or projection.shape[2] != spec.head_size_v
        or not 0 < key_size < projection.shape[1]
    ):
        raise ContractError(
            f"projection has shape {tuple(projection.shape)}; it must be [num_heads="
            f"{spec.num_heads}, key_size + value size, head_size_v={spec.head_size_v}], with "
            f"key_size={key_size} above 0 and below the second size",
            rule="M12",
        )
    if context_tokens < 1:
        raise ContractError(f"context_tokens={context_tokens} must be at least 1")
