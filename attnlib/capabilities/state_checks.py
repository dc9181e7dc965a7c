"""One check per field of `StateSpec`, against what a backend declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attnlib.capabilities.declaration import NOT_STATED
from attnlib.capabilities.predicates import check_cudagraph, flag, member, not_stated
from attnlib.capabilities.state_declaration import StateCapabilities
from attnlib.spec import StateSpec

__all__ = ["STATE_CHECKS", "chosen_form"]

_Check = Callable[[StateSpec, StateCapabilities], "str | None"]


def chosen_form(spec: StateSpec, caps: StateCapabilities) -> str | None:
    """The first form of the backend that fits the spec (T9); None if none does."""
    return next((form for form in caps.forms or () if spec.fits(form)), None)


def _recurrence(check: _Check) -> _Check:
    """A check of layers that have a recurrence."""
    return lambda spec, caps: check(spec, caps) if spec.has_recurrence else None


def _convolution(check: _Check) -> _Check:
    """A check of layers that have a convolution."""
    return lambda spec, caps: check(spec, caps) if spec.has_convolution else None


def _check_form(spec: StateSpec, caps: StateCapabilities) -> str | None:
    if spec.form is not None or caps.forms is NOT_STATED:
        return member("forms", lambda s: s.form, "form")(spec, caps)
    return None  # what no form can do, `max_rollback` and `batch_invariant` report


def _check_rollback(spec: StateSpec, caps: StateCapabilities) -> str | None:
    if not spec.max_rollback:
        return None
    if caps.max_rollback is NOT_STATED:
        return not_stated("max_rollback")
    if spec.max_rollback > caps.max_rollback:
        return f"max_rollback={spec.max_rollback} not supported (up to {caps.max_rollback})"
    if spec.form is None and chosen_form(spec.replace(batch_invariant=False), caps) is None:
        return (
            f"max_rollback={spec.max_rollback} needs another form than "
            f"{', '.join(caps.forms or ())}"
        )
    return None


def _check_invariance(spec: StateSpec, caps: StateCapabilities) -> str | None:
    if not spec.batch_invariant:
        return None
    reason = flag("batch_invariant", lambda s: True, "batch_invariant=True")(spec, caps)
    if reason is None and spec.form is None and "tail" not in (caps.forms or ()):
        return "batch_invariant=True needs form='tail': not supported"
    return reason


def _check_chunk(spec: StateSpec, caps: StateCapabilities) -> str | None:
    if spec.chunk_size is None or chosen_form(spec, caps) != "tail":
        return None
    return member("chunk_sizes", lambda s: s.chunk_size, "chunk_size")(spec, caps)


STATE_CHECKS: Mapping[str, _Check] = {
    "num_heads": lambda spec, caps: None,  # any number: what can fail is the ratio
    "num_key_heads": _recurrence(
        member("group_sizes", lambda s: s.group_size, "num_heads/num_key_heads")
    ),
    "key_size": _recurrence(member("key_sizes", lambda s: s.key_size, "key_size")),
    "value_size": _recurrence(member("value_sizes", lambda s: s.value_size, "value_size")),
    "update": _recurrence(member("updates", lambda s: s.update, "update")),
    "decay": _recurrence(member("decays", lambda s: s.decay, "decay")),
    "has_beta": _recurrence(flag("beta", lambda s: s.has_beta, "a beta per token")),
    "has_skip": flag("skip", lambda s: s.has_skip, "skip * v"),
    "qk_norm": flag("qk_norm", lambda s: s.qk_norm, "qk_norm=True"),
    "conv_channels": lambda spec, caps: None,  # any number
    "conv_width": _convolution(member("conv_widths", lambda s: s.conv_width, "conv_width")),
    "conv_activation": _convolution(
        member("conv_activations", lambda s: s.conv_activation or "none", "conv_activation")
    ),
    "has_conv_bias": flag("conv_bias", lambda s: s.has_conv_bias, "a convolution with a bias"),
    "dtype": member("dtypes", lambda s: s.dtype, "dtype"),
    "state_dtype": _recurrence(member("state_dtypes", lambda s: s.state_dtype, "state_dtype")),
    "max_rollback": _check_rollback,
    "batch_invariant": _check_invariance,
    "chunk_size": _check_chunk,
    "form": _check_form,
    "cudagraph": check_cudagraph,
}
"""Spec field -> its check; a test compares the keys with the fields of `StateSpec`."""
