"""attnlib as an attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend attnlib

SGLang finds `register` by the entry point `sglang.srt.plugins`. ATTNLIB_BACKEND selects attnlib's
backend inside SGLang as it does elsewhere. `backend` is the attention backend, `batch` translates
SGLang's batches and `graph_buffers` holds the tensors that captured graphs read. Only `register`
can be imported without SGLang.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "attnlib"
"""The value of `--attention-backend`."""


def register() -> None:
    """Register attnlib with SGLang, as a choice of the command line and as a backend."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    """The backend of a model runner; imported when SGLang asks for it."""
    from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

    return AttnlibAttentionBackend(runner)
