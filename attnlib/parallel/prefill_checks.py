"""Checks of divided prefills, before anything is written or sent (X8, X10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.layer.checks import refuse_gradients
from attnlib.ops.addresses import as_count, check_block_table
from attnlib.parallel.checks import check_made_for, check_own_cache, sized
from attnlib.parallel.divisions import Division
from attnlib.parallel.group import RankGroup
from attnlib.parallel.local_spec import rejections
from attnlib.parallel.prefill_call import PrefillCall
from attnlib.parallel.prefill_metadata import PrefillMetadata
from attnlib.parallel.setup_checks import check_choices
from attnlib.spec import AttentionSpec, MaskKind

if TYPE_CHECKING:
    from attnlib.parallel.prefill import ParallelPrefill

__all__ = ["check_prefill", "check_prefill_call", "checked_prompts", "keeps_order"]

_METHODS = ("ring", "all_gather")


def keeps_order(spec: AttentionSpec) -> bool:
    """Whether attention to the keys of another rank does not depend on their distance."""
    full = spec.visible_window.left is None and spec.attention_chunk_size is None
    return full and not spec.has_alibi and not spec.batch_invariant


def check_prefill(
    spec: AttentionSpec, group: RankGroup, division: Division, method: str | None, agreement: str
) -> None:
    """Whether prompts of such layers can be divided.

    Raises:
        ContractError: a value that is not known, or a division for another number of ranks.
        UnsupportedConfigError: a layer that cannot be divided, or passed around a ring.
    """
    check_choices(group, division, agreement, ("method", method, _METHODS))
    reasons = rejections(spec)
    if spec.mask_kind is not MaskKind.CAUSAL:
        reasons.append(f"mask_kind={spec.mask_kind.value}: a divided prefill is causal")
    if method == "ring" and not keeps_order(spec):
        reasons.append(
            "method='ring' with a window, chunks, ALiBi or batch invariance, which relate a query "
            "to keys of other ranks: use 'all_gather'"
        )
    if reasons:
        raise UnsupportedConfigError(
            f"context parallelism: {'; '.join(reasons)}: run this layer on one rank",
            reasons=reasons,
        )


def checked_prompts(
    layer: ParallelPrefill,
    prompt_lens: Sequence[int],
    context_lens: Sequence[int] | None,
    block_table: Tensor,
) -> tuple[list[int], list[int]]:
    """The new tokens and the context of each prompt; arguments of `PrefillBuilder.build`.

    Raises:
        ContractError: lengths that are not integers of at least 0, lengths and rows of the table
            that do not fit each other, or, on a CPU, no block where the rank has keys.
    """
    lengths = _counts("prompt_lens", prompt_lens)
    contexts = [0] * len(lengths) if context_lens is None else _counts("context_lens", context_lens)
    rows, size = block_table.shape[0], layer.spec.block_size
    if not len(lengths) == len(contexts) == rows:
        raise ContractError(
            f"{len(lengths)} prompts of {lengths} new tokens after {contexts} with {rows} rows of "
            "the block table: pass one row and one context length for each",
            rule="X10",
        )
    longest = max((a + b for a, b in zip(lengths, contexts, strict=True)), default=0)
    needed = layer.division.bound(longest)
    if needed > block_table.shape[1] * size:
        raise ContractError(
            f"block_table has {block_table.shape[1]} columns, but a rank holds {needed} keys of a "
            f"prompt: it needs {-(-needed // size)}",
            rule="X2",
        )
    totals = [a + b for a, b in zip(lengths, contexts, strict=True)]
    both = torch.tensor(totals, dtype=torch.int64, device=block_table.device)
    held = layer.division.count(both, layer.group.rank)
    check_block_table(block_table, held, size, None)
    return lengths, contexts


def _counts(name: str, values: Sequence[int]) -> list[int]:
    try:
        given = list(values)
    except TypeError:
        raise ContractError(
            f"{name} is a {type(values).__name__}; pass a list of one integer for each prompt",
            rule="X10",
        ) from None
    return [as_count(f"{name}[{place}]", value) for place, value in enumerate(given)]


def check_prefill_call(
    layer: ParallelPrefill,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    metadata: PrefillMetadata,
    output: Tensor | None,
) -> PrefillCall:
    """The tensors of a call, after all ranks have agreed.

    Raises:
        ContractError: see `ParallelPrefill.forward`.
    """
    known = isinstance(metadata, PrefillMetadata) and metadata.agreed

    def attempt() -> tuple[object, PrefillCall]:
        call = _checked(layer, query, key, value, cache, metadata, output)
        return (str(layer.spec), _host_scales(layer.spec, cache)), call

    skips = known and layer.agreement == "batch"
    agreement = "never" if skips else layer.agreement
    call = layer.group.agreed(agreement, "prefill call", attempt)
    metadata.agreed = True
    return call


def _host_scales(spec: AttentionSpec, cache: PagedKVCache) -> list[object]:
    """Scales outside of the pages, for which the ranks send stored elements; None on a GPU."""
    if not spec.is_kv_quantized or spec.scales_in_page:
        return []
    return [
        None
        if isinstance(scale, Tensor) and not scale.is_cpu
        else torch.as_tensor(scale, dtype=torch.float32, device="cpu").tolist()
        for scale in (cache.k_scale, cache.v_scale)
    ]


def _checked(
    layer: ParallelPrefill,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedKVCache,
    metadata: PrefillMetadata,
    output: Tensor | None,
) -> PrefillCall:
    spec = layer.spec
    if not isinstance(metadata, PrefillMetadata):
        raise ContractError(
            f"metadata is a {type(metadata).__name__}; build it with the builder of "
            "ParallelPrefill.make_builder",
            rule="X10",
        )
    check_made_for(layer, metadata)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ContractError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    refuse_gradients(query, key, value)
    tokens = metadata.num_actual_tokens
    given = {
        "query": (query, spec.num_heads, spec.head_size),
        "key": (key, spec.num_kv_heads, spec.head_size),
        "value": (value, spec.num_kv_heads, spec.head_size_v),
    }
    device = cache.device if isinstance(cache, PagedKVCache) else query.device
    query, key, value = (
        sized(name, *each, spec.dtype, device, tokens) for name, each in given.items()
    )
    if query.shape[0] != tokens:
        raise ContractError(
            f"query has {query.shape[0]} rows, but this rank has {tokens} tokens of the batch",
            rule="X10",
        )
    check_own_cache(layer.causal, query, cache, None if spec.kv_sharing else key)
    _check_slots(metadata, cache)
    parts = [key] if spec.use_mla else [key, value]
    sent = []
    for part in parts:
        padded = part.new_zeros(metadata.num_padded_tokens, *part.shape[1:])
        padded[:tokens] = part[:tokens]
        sent.append(padded)
    if output is None:
        shape = (tokens, spec.num_heads, spec.head_size_v)
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
    return PrefillCall(query, sent, output, cache, metadata, not spec.kv_sharing)


def _check_slots(metadata: PrefillMetadata, cache: PagedKVCache) -> None:
    """On a CPU, whether the slots of a batch are in the cache."""
    found = torch.cat((metadata.cache_slots.flatten(), metadata.context_slots))
    num_slots = cache.num_blocks * cache.block_size
    if (
        found.device.type == "cpu"
        and len(found)
        and not -1 <= int(found.min()) <= int(found.max()) < num_slots
    ):
        raise ContractError(
            f"slots from {int(found.min())} to {int(found.max())}, but the cache has "
            f"{cache.num_blocks} blocks of {cache.block_size} tokens: pass the block table of this "
            "cache",
            rule="X2",
        )
