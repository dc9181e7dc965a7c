"""Checks of the features of a spec and of their combinations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.errors import ContractError
from attnlib.score_functions.function import ScoreFunction
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec.kinds import AttentionType, MaskKind

if TYPE_CHECKING:
    from attnlib.spec.attention_spec import AttentionSpec

__all__ = ["check_features"]


def check_features(spec: AttentionSpec) -> None:
    """Check each optional feature, and what it cannot be combined with.

    Raises:
        ContractError: no attention layer can have these values.
    """
    _check_query_bias(spec)
    _check_score_function(spec)
    _check_call_tensors(spec)
    _check_key_selection(spec)
    _check_compressed_entries(spec)
    _check_fp8_queries(spec)
    _check_kv_rotation(spec)


def _check_query_bias(spec: AttentionSpec) -> None:
    """Refuse what counts positions beside a bias that may give several rows one position (M3)."""
    if spec.mask_kind is not MaskKind.QUERY_BIAS:
        return
    function, window = spec.score_function, spec.window
    counting = {
        "sliding_window": spec.sliding_window,
        "window": None if window is None or window.is_full else tuple(window),
        "attention_chunk_size": spec.attention_chunk_size,
        "has_alibi": spec.has_alibi or None,
        "score_function": function if _counts_rows(function) else None,
    }
    for name, value in counting.items():
        if value is not None:
            raise ContractError(
                f"{name}={value} with mask_kind=query_bias: {name} counts positions, and in a "
                "tree of tokens several rows have one position, which a bias does not state: use "
                "attnlib.spec.tree_spec and its batch tensor of positions, or verify the tree with "
                "one request per branch and mask_kind='causal'",
                rule="M20",
            )


def _counts_rows(function: ScoreFunction | None) -> bool:
    """Whether a score function reads positions, and takes them for rows."""
    return isinstance(function, ScoreFunction) and not function.in_tree and function.reads_positions


def _check_score_function(spec: AttentionSpec) -> None:
    function = spec.score_function
    if function is not None and not isinstance(function, ScoreFunction):
        raise ContractError(
            f"score_function={function!r} is a {type(function).__name__}; wrap the function: "
            "attnlib.score_functions.ScoreFunction(function)",
            rule="M10",
        )
    wanted = MaskKind.BIDIRECTIONAL
    if function is not None and function.needs_bidirectional and spec.mask_kind is not wanted:
        raise ContractError(
            f"score function {function} decides about later keys itself, and mask_kind="
            f"{spec.mask_kind.value} hides them: set mask_kind='bidirectional'",
            rule="M10",
        )


def _check_call_tensors(spec: AttentionSpec) -> None:
    """Refuse what has no tensors of query tokens beside them (M21, M22)."""
    if not spec.has_query_tensors:
        return
    rule = "M22" if spec.token_sinks else "M21"
    needs = "token_sinks=True" if spec.token_sinks else f"score_function={spec.score_function}"
    other = {
        "has_sink": (spec.has_sink and spec.token_sinks, "a row has one sink"),
        "use_mla": (spec.use_mla, "latents have no tensors of query tokens"),
        "key_selection": (spec.key_selection, "a call passes one of both"),
        "compressed_entries": (spec.compressed_entries, "a call passes one of both"),
    }
    for name, (value, reason) in other.items():
        if value:
            raise ContractError(
                f"{name}={value} with {needs}: {reason}; leave one of them out", rule=rule
            )


def _check_key_selection(spec: AttentionSpec) -> None:
    if spec.key_selection is None:
        return
    if not isinstance(spec.key_selection, KeySelection):
        raise ContractError(
            f"key_selection={spec.key_selection!r} is a {type(spec.key_selection).__name__}; "
            "it must be an attnlib.sparse.key_selection.KeySelection",
            rule="M11",
        )
    if not spec.is_paged:
        raise ContractError(
            f"attn_type={spec.attn_type.value} has no paged keys to select from: "
            "key_selection needs a decoder or encoder_decoder layer",
            rule="M11",
        )


def _check_compressed_entries(spec: AttentionSpec) -> None:
    if spec.compressed_entries is None:
        return
    if not isinstance(spec.compressed_entries, CompressedEntries):
        raise ContractError(
            f"compressed_entries={spec.compressed_entries!r} is a "
            f"{type(spec.compressed_entries).__name__}; it must be an "
            "attnlib.sparse.compressed_entries.CompressedEntries",
            rule="M17",
        )
    if spec.attn_type is not AttentionType.DECODER or spec.mask_kind is not MaskKind.CAUSAL:
        raise ContractError(
            f"attn_type={spec.attn_type.value} with mask_kind={spec.mask_kind.value}: "
            "compressed_entries needs a causal decoder, whose queries see the entries of "
            "earlier tokens",
            rule="M17",
        )
    other = {
        "key_selection": spec.key_selection,
        "score_function": spec.score_function,
        "has_alibi": spec.has_alibi or None,
    }
    for name, value in other.items():
        if value is not None:
            raise ContractError(
                f"{name}={value} and compressed_entries are both given: a layer with two key "
                "streams selects entries (CompressedEntries.selection), and its entries have "
                "no position for biases",
                rule="M17",
            )


def _check_fp8_queries(spec: AttentionSpec) -> None:
    if not spec.allow_fp8_queries:
        return
    if spec.kv_dtype != torch.float8_e4m3fn or spec.scales_in_page:
        raise ContractError(
            f"allow_fp8_queries=True with kv_cache_dtype={spec.kv_cache_dtype}: queries are "
            "rounded to the elements of an e4m3 cache; use kv_cache_dtype='fp8_e4m3', or leave "
            "it False",
            rule="M19",
        )
    if spec.batch_invariant:
        raise ContractError(
            "allow_fp8_queries=True with batch_invariant=True: decodes do not round queries, "
            "so the bits of a row would depend on the batch; drop one of them",
            rule="M19",
        )


def _check_kv_rotation(spec: AttentionSpec) -> None:
    if spec.kv_rotation is None:
        return
    other = {
        "use_mla": (spec.use_mla, "values of latents are a prefix of their keys"),
        "compressed_entries": (spec.compressed_entries, "the caller stores entries as they are"),
        "allow_fp8_queries": (spec.allow_fp8_queries, "queries would be rounded twice"),
        "attn_type": (not spec.is_paged and spec.attn_type.value, "its keys are not in a cache"),
    }
    for name, (value, reason) in other.items():
        if value:
            raise ContractError(
                f"{name}={value} with kv_rotation={spec.kv_rotation}: {reason}; leave one of them "
                "out",
                rule="P15",
            )
