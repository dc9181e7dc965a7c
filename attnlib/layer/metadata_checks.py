"""Checks of the metadata of a layer call: type, spec, addresses on a CPU, further keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer.call import ExtraKeys, LayerCall
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.metadata.facts import BatchFacts
from attnlib.ops.addresses import are_readable, check_block_table, check_starts
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = [
    "check_addresses",
    "check_extra_keys",
    "check_extra_values",
    "check_metadata",
    "check_metadata_type",
    "extra_keys",
]

_SAME_IN_METADATA = ("block_size", "num_heads", "num_kv_heads", "head_size", "head_size_v")


def check_metadata_type(layer: Attention, metadata: object) -> None:
    """Whether `metadata` was made by a builder of the layer's backend.

    Raises:
        ContractError: it is of another type.
    """
    name, expected = layer.backend.get_name(), layer.backend.get_metadata_cls()
    if not isinstance(metadata, expected):
        raise ContractError(
            f"metadata is a {type(metadata).__name__}; backend {name} needs the "
            f"{expected.__name__} that its builder makes: "
            "layer.backend.make_builder(spec, device).build(0, common_attn_metadata). For builders "
            "of another class of metadata, use attnlib.compat.vllm.adapt_backend(backend)"
        )


def check_metadata(layer: Attention, metadata: AttentionMetadata) -> None:
    """Whether `metadata` was made by a builder of the layer's backend, for such layers.

    Raises:
        ContractError: it is of another type, or made for another spec.
    """
    check_metadata_type(layer, metadata)
    facts = metadata.facts
    made_for = facts.spec
    if made_for is None:
        return
    for field in _SAME_IN_METADATA:
        theirs, ours = getattr(made_for, field), getattr(layer.spec, field)
        if theirs != ours:
            raise ContractError(
                f"metadata was built for {field}={theirs}, the layer's spec has {ours}: build it "
                "with the builder of this layer's group"
            )
    if facts.causal_from_spec and made_for.is_causal != layer.spec.is_causal:
        raise ContractError(
            f"metadata was built for attn_type={made_for.attn_type.value}, the layer's spec has "
            f"attn_type={layer.spec.attn_type.value}, and the batch leaves causality to the spec: "
            "build it with the builder of this layer's group",
            rule="M1",
        )


def check_addresses(metadata: AttentionMetadata, cache: PagedKVCache) -> None:
    """Whether block ids and slots of a batch on the CPU are inside the cache. Elsewhere reading
    them would synchronize, and ATTNLIB_VALIDATE=1 does.

    Raises:
        ContractError: the message names the tensor, the index and the value.
    """
    table, seq_lens = metadata.facts.block_table, metadata.facts.seq_lens
    if table is not None and seq_lens is not None and table.numel():
        check_block_table(table, seq_lens, cache.block_size, cache.num_blocks)
    slots = metadata.slot_mapping
    if slots is not None and slots.numel():
        least, most = slots.aminmax()
        if least < -1 or most >= cache.num_slots:
            token = int(((slots < -1) | (slots >= cache.num_slots)).int().argmax())
            raise ContractError(
                f"slot_mapping[{token}]={slots[token]} is outside the cache of {cache.num_slots} "
                "slots (-1 writes nothing)",
                rule="P4",
            )


def extra_keys(
    selected_keys: SelectedKeys | None,
    compressed_keys: CompressedKeys | None,
    query_tensors: QueryTensors | None,
) -> ExtraKeys | None:
    """The one of these arguments of a call that is given; no layer takes two."""
    if query_tensors is not None:
        if selected_keys is not None or compressed_keys is not None:
            other = "selected_keys" if compressed_keys is None else "compressed_keys"
            raise ContractError(
                f"query_tensors and {other} are both given, and no layer takes both: leave one out",
                rule="M21",
            )
        _refuse_tracing("tensors of query tokens", "M21")
        return query_tensors
    if compressed_keys is None:
        return selected_keys
    if selected_keys is not None:
        raise ContractError(
            "selected_keys and compressed_keys are both given: lists of selected entries are a "
            "part of CompressedKeys",
            rule="M17",
        )
    _refuse_tracing("compressed entries", "M17")
    return compressed_keys


def _refuse_tracing(what: str, rule: str) -> None:
    if torch.compiler.is_compiling():
        raise ContractError(
            f"a layer with {what} cannot be traced by torch.compile: call it in a function with "
            "torch.compiler.disable",
            rule=rule,
        )


def check_extra_keys(spec: AttentionSpec, call: LayerCall) -> None:
    """Whether a call passes the selected keys (M11), entries (M17) or tensors of query tokens (M21,
    M22) that the spec declares.

    Raises:
        ContractError: they are missing, given without being declared, or of another form.
    """
    entries, extra, facts = spec.compressed_entries, call.extra, call.metadata.facts
    if spec.has_query_tensors or isinstance(extra, QueryTensors):
        _check_query_tensors(spec, call, facts)
        return
    if entries is None and not isinstance(extra, CompressedKeys):
        _check_selected_keys(spec, call.query, facts, extra)
        return
    if entries is None or extra is None:
        given = "missing" if extra is None else "given"
        raise ContractError(
            f"compressed_keys is {given}, but the spec has compressed_entries={entries}: a call "
            "passes entries exactly when the spec declares their form",
            rule="M17",
        )
    if not isinstance(extra, CompressedKeys):
        raise ContractError(
            f"a layer with compressed_entries={entries} got a {type(extra).__name__}; pass "
            "compressed_keys, an attnlib.metadata.compressed.CompressedKeys",
            rule="M17",
        )
    extra.check(spec, call.query, facts.num_actual_tokens or 0)


def _check_query_tensors(spec: AttentionSpec, call: LayerCall, facts: BatchFacts) -> None:
    extra = call.extra
    if not isinstance(extra, QueryTensors) or not spec.has_query_tensors:
        given = "missing" if extra is None else f"a {type(extra).__name__}"
        needs = f"token_sinks={spec.token_sinks}, score_function={spec.score_function}"
        raise ContractError(
            f"query_tensors is {given}, but the spec has {needs}: pass an attnlib.score_functions."
            "QueryTensors exactly when the spec has token_sinks or a function with query tensors",
            rule="M21",
        )
    sink_heads = spec.num_heads if spec.token_sinks else None
    tokens = facts.num_actual_tokens or 0
    extra.check(spec.score_function, sink_heads, tokens, call.query.device)


def _check_selected_keys(
    spec: AttentionSpec, query: torch.Tensor, facts: BatchFacts, selected_keys: SelectedKeys | None
) -> None:
    selection = spec.key_selection
    if selection is None and selected_keys is None:
        return
    if selection is None or selected_keys is None:
        given = "missing" if selected_keys is None else "given"
        raise ContractError(
            f"selected_keys is {given}, but the spec has key_selection={selection}: a call passes "
            "lists exactly when the spec declares their form",
            rule="M11",
        )
    if not isinstance(selected_keys, SelectedKeys):
        raise ContractError(
            f"selected_keys is a {type(selected_keys).__name__}; it must be an "
            "attnlib.sparse.key_selection.SelectedKeys",
            rule="M11",
        )
    starts = facts.query_start_loc
    selected_keys.check(
        selection,
        spec.num_heads,
        spec.num_kv_heads,
        0 if starts is None else starts.shape[0] - 1,
        facts.num_actual_tokens or 0,
        query.device,
    )


def check_extra_values(spec: AttentionSpec, call: LayerCall) -> None:
    """Whether the lists and the blocks of further keys exist: in every call on a CPU, and elsewhere
    under ATTNLIB_VALIDATE, because layers and steps pass other values under one signature.

    Raises:
        ContractError: offsets of lists that decrease or end past them, a request with fewer lists
            than its queries need, or a block outside of the cache of the entries.
    """
    extra, entries = call.extra, spec.compressed_entries
    if isinstance(extra, CompressedKeys) and entries is not None:
        extra.check_blocks(entries.block_size)
        return
    starts = call.metadata.facts.query_start_loc
    if isinstance(extra, SelectedKeys) and spec.key_selection is not None and starts is not None:
        _check_list_starts(extra, starts, spec.key_selection.query_block_size)


def _check_list_starts(selected: SelectedKeys, starts: torch.Tensor, block: int) -> None:
    lists = selected.list_start_loc
    if lists is None or not (are_readable(lists) and are_readable(starts)):
        return
    check_starts("list_start_loc", lists, selected.indices.shape[0])
    needed = torch.div(starts.diff() + block - 1, block, rounding_mode="floor")
    wrong = lists.diff() < needed
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        first, end = (int(x) for x in lists[request : request + 2])
        raise ContractError(
            f"list_start_loc gives request {request} the lists [{first}, {end}), but its "
            f"{int(starts.diff()[request])} queries need {int(needed[request])} lists of {block} "
            "queries each",
            rule="M11",
        )
