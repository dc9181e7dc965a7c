"""Attention to some of the keys: what a layer declares about them, and their choice.

`key_selection.py` (M11) and `compressed_entries.py` (M17) are parts of a spec, `indexer.py` (M14)
computes the lists of a call. `KeyIndexer` is imported from its module: it needs a cache.
"""

from attnlib.sparse.compressed_entries import CompressedEntries as CompressedEntries
from attnlib.sparse.key_selection import KeySelection as KeySelection
from attnlib.sparse.key_selection import SelectedKeys as SelectedKeys
from attnlib.sparse.key_selection import SelectionScope as SelectionScope

__all__ = ["CompressedEntries", "KeySelection", "SelectedKeys", "SelectionScope"]
