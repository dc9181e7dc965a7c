"""Where a figure comes from, for the scripts of this folder: what `attnlib bench` says of itself."""

from __future__ import annotations

from attnlib.bench.provenance import provenance

__all__ = ["provenance"]
