"""The former path of `attnlib.sparse.key_selection`."""

from attnlib.sparse.key_selection import *  # noqa: F403
