"""The former path of `attnlib.sparse.indexer`."""

from attnlib.sparse.indexer import *  # noqa: F403
