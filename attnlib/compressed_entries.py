"""The former path of `attnlib.sparse.compressed_entries`."""

from attnlib.sparse.compressed_entries import *  # noqa: F403
