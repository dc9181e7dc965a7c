"""The base classes that a backend derives from: its metadata for one batch, and the builder."""

from attnlib.metadata.batch_metadata import AttentionMetadata as AttentionMetadata
from attnlib.metadata.builder import AttentionMetadataBuilder as AttentionMetadataBuilder
from attnlib.metadata.builder import M as M

__all__ = ["AttentionMetadata", "AttentionMetadataBuilder", "M"]
