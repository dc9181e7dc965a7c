"""`attnlib demo`: serve a batch of prompts by continuous batching over the paged cache, and check every token against eager attention."""

from attnlib.cli.demo.main import main

__all__ = ["main"]
