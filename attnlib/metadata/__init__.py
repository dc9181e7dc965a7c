"""Metadata of a batch: what all layers and backends share, and what a backend derives from it.

Input: lengths, block table and slot mapping. Output: `CommonAttentionMetadata`, which the metadata
builder of a backend turns into its own metadata, once per batch.

The public classes and functions are names of this package, imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "AttentionMetadata": "attnlib.metadata.batch_metadata",
    "AttentionMetadataBuilder": "attnlib.metadata.builder",
    "AttentionState": "attnlib.metadata.state",
    "CommonAttentionMetadata": "attnlib.metadata.common",
    "CompressedKeys": "attnlib.metadata.compressed",
    "EntryBatch": "attnlib.metadata.compressed",
    "GraphGuard": "attnlib.metadata.graph_guard",
    "PagedMetadata": "attnlib.metadata.paged",
    "PerLayerParameters": "attnlib.metadata.parameters",
    "StateMetadata": "attnlib.metadata.states",
    "StateMetadataBuilder": "attnlib.metadata.states",
    "find_shared_prefixes": "attnlib.metadata.shared_prefix",
    "get_per_layer_parameters": "attnlib.metadata.parameters",
    "infer_global_hyperparameters": "attnlib.metadata.parameters",
    "make_local_attention_virtual_batches": "attnlib.metadata.transforms",
    "reorder_batch_to_split_decodes_and_prefills": "attnlib.metadata.split",
    "split_decodes_and_prefills": "attnlib.metadata.split",
}
"""Name -> module that defines it."""

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from attnlib.metadata.batch_metadata import AttentionMetadata as AttentionMetadata
    from attnlib.metadata.builder import AttentionMetadataBuilder as AttentionMetadataBuilder
    from attnlib.metadata.common import CommonAttentionMetadata as CommonAttentionMetadata
    from attnlib.metadata.compressed import CompressedKeys as CompressedKeys
    from attnlib.metadata.compressed import EntryBatch as EntryBatch
    from attnlib.metadata.graph_guard import GraphGuard as GraphGuard
    from attnlib.metadata.paged import PagedMetadata as PagedMetadata
    from attnlib.metadata.parameters import PerLayerParameters as PerLayerParameters
    from attnlib.metadata.parameters import get_per_layer_parameters as get_per_layer_parameters
    from attnlib.metadata.parameters import (
        infer_global_hyperparameters as infer_global_hyperparameters,
    )
    from attnlib.metadata.shared_prefix import find_shared_prefixes as find_shared_prefixes
    from attnlib.metadata.split import (
        reorder_batch_to_split_decodes_and_prefills as reorder_batch_to_split_decodes_and_prefills,
    )
    from attnlib.metadata.split import split_decodes_and_prefills as split_decodes_and_prefills
    from attnlib.metadata.state import AttentionState as AttentionState
    from attnlib.metadata.states import StateMetadata as StateMetadata
    from attnlib.metadata.states import StateMetadataBuilder as StateMetadataBuilder
    from attnlib.metadata.transforms import (
        make_local_attention_virtual_batches as make_local_attention_virtual_batches,
    )


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(
            f"module 'attnlib.metadata' has no attribute {name!r}; its names are "
            f"{', '.join(__all__)}"
        )
    value = getattr(import_module(module), name)
    globals()[name] = value  # later look-ups do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
