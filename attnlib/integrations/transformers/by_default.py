"""attnlib as the implementation of models for which a program names none, for `attnlib run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.registration import NAME, _replace, _replaced, register

__all__ = ["use_by_default"]

_CHOICE = "get_correct_attn_implementation"


def use_by_default() -> None:
    """Register attnlib, and let it take the place of `sdpa` and `eager` in models for which no
    implementation is named and whose implementation can be set. `unregister` undoes both.

    Raises:
        UnsupportedConfigError: this version of transformers chooses in another way.
    """
    import transformers

    register()
    model_class = transformers.PreTrainedModel
    if not hasattr(model_class, _CHOICE):
        raise UnsupportedConfigError(
            f"attnlib cannot become the default of transformers {transformers.__version__}: its "
            f"models have no {_CHOICE}; name the implementation, attn_implementation='{NAME}'"
        )
    if not any(owner is model_class and name == _CHOICE for owner, name, _ in _replaced):
        _replace(model_class, _CHOICE, _prefer_attnlib)


def _prefer_attnlib(original: Callable[..., str]) -> Callable[..., str]:
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if requested_attention is None and self._can_set_attn_implementation():
            return NAME
        return original(self, requested_attention, is_init_check)

    return get_correct_attn_implementation
