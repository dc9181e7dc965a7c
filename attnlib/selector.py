"""`vllm.attention.selector`: the selection of a backend, under the name of its module there."""

from attnlib.selection import get_attn_backend

__all__ = ["get_attn_backend"]
