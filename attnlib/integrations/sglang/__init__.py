"""attnlib as an attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend attnlib

SGLang finds `register` by the entry point `sglang.srt.plugins`. ATTNLIB_BACKEND selects attnlib's
backend inside SGLang as it does elsewhere. `backend` is the attention backend, `layers`
translates its layers and `batch` its batches, `trees` the masks of draft tokens; `graph_buffers`
holds the tensors that captured graphs read, `model_lists` opens checks of models, and `draft_steps`
serves EAGLE drafts. Only `register` can be imported without SGLang.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "attnlib"
"""The value of `--attention-backend`."""


def register() -> None:
    """Register attnlib with SGLang, as a choice of the command line and as a backend."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from attnlib.integrations.sglang.draft_steps import open_draft_factory
    from attnlib.integrations.sglang.model_lists import open_model_lists

    server_args.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # 0.5.17
        choices = server_args
    else:
        choices.add_draft_attention_backend_choices([NAME])
        open_draft_factory(NAME)
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    open_model_lists(NAME)


def _create(runner: Any) -> Any:
    """The backend of a model runner; imported when SGLang asks for it."""
    from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

    return AttnlibAttentionBackend(runner)
