"""The class that vLLM gets for attnlib's name.

vLLM has one class per name of a backend. A class serves latent attention (MLA), that over selected
keys, or other layers, and one format of pages with scales. `Backend` is the one for the model that
is being loaded. `Custom` stands for CUSTOM, attnlib's name up to vLLM 0.26, in releases that know
attnlib by its own name; asking for it is an error.
"""

from __future__ import annotations

from typing import Any

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.format_names import is_page_name

__all__ = ["Backend"]  # noqa: F822  # by `__getattr__`


def __getattr__(name: str) -> Any:
    """`Backend`, by vLLM's current configuration.

    Raises:
        UnsupportedConfigError: for `Custom`.
    """
    if name == "Custom":
        raise UnsupportedConfigError(
            "no backend is registered as CUSTOM: attnlib's name in this release of vLLM is ATTNLIB "
            "(--attention-backend ATTNLIB)",
            backend="attnlib",
        )
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and model.use_mla:
        if hasattr(model.hf_text_config, "index_topk"):
            from attnlib.integrations.vllm.mla_sparse import AttnlibSparseMLABackend

            return AttnlibSparseMLABackend
        from attnlib.integrations.vllm.mla_backend import AttnlibMLABackend

        return AttnlibMLABackend
    stored = "auto" if config is None else config.cache_config.cache_dtype
    if is_page_name(stored):
        from attnlib.integrations.vllm.page_backend import backend_of

        return backend_of(stored)
    from attnlib.integrations.vllm.backend import AttnlibBackend

    return AttnlibBackend
