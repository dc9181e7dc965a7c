"""Compressed entries (M17): what a layer with a second key stream declares.

DeepSeek V4 compresses each `compress_rate` tokens to one entry. A query attends to a window of its
own keys and to entries, under one softmax. `CompressedEntries` is the part that never changes and
belongs to the layer's spec; `attnlib.metadata.compressed` holds what a call passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnlib.errors import ContractError
from attnlib.sparse.key_selection import KeySelection, SelectionScope

__all__ = ["CompressedEntries"]


@dataclass(frozen=True, kw_only=True)
class CompressedEntries:
    """The form of a layer's compressed entries.

    Attributes:
        compress_rate: consecutive tokens that one entry stands for.
        block_size: entries per block of their cache.
        selection: the form of the lists of entries that a call passes, with block_size=1 and
            query_block_size=1; None attends to all visible entries.

    Raises:
        ContractError: a size below 1, or a selection of another form.
    """

    compress_rate: int
    block_size: int = 64
    selection: KeySelection | None = None

    def __post_init__(self) -> None:
        for name in ("compress_rate", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(
                    f"{name}={value!r} of compressed entries must be an integer of at least 1",
                    rule="M17",
                )
        selection = self.selection
        if not isinstance(selection, KeySelection | None):
            raise ContractError(
                f"selection={selection!r} of compressed entries must be a KeySelection or None",
                rule="M17",
            )
        if selection is not None and (selection.block_size, selection.query_block_size) != (1, 1):
            raise ContractError(
                f"the selection of compressed entries is {selection}: its block_size and "
                "query_block_size must be 1, because a list holds entries of one query",
                rule="M17",
            )

    @classmethod
    def parse(cls, text: str) -> CompressedEntries:
        """The entries that `RATE:BLOCK_SIZE` or `RATE:BLOCK_SIZE:MAX_SELECTED` denotes, for command
        lines.

        Raises:
            ContractError: the text is not of this form.
        """
        parts = text.split(":")
        if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
            raise ContractError(
                f"{text!r} does not describe compressed entries: write RATE:BLOCK_SIZE or "
                "RATE:BLOCK_SIZE:MAX_SELECTED, for example 4:64:512",
                rule="M17",
            )
        rate, block_size, *most = map(int, parts)
        selection = (
            KeySelection(max_blocks=most[0], scope=SelectionScope.ALL_HEADS) if most else None
        )
        return cls(compress_rate=rate, block_size=block_size, selection=selection)

    def __str__(self) -> str:
        """The fields in one line, for messages."""
        which = "all entries" if self.selection is None else f"{self.selection.max_blocks} entries"
        return f"{which} of {self.compress_rate} tokens"
