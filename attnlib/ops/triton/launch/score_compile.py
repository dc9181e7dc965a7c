"""Score functions as device functions of Triton or Gluon (M10).

A Python function is compiled from a copy without type annotations, which Triton would evaluate. In
its globals, operators are replaced by their device functions, numbers by compile-time constants,
and functions that it calls by such copies.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attnlib.kv_formats.number_table import Number
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels import score as device_code
from attnlib.ops.triton.kernels.page_formats import find_number
from attnlib.ops.triton.launch.score_source import device_source
from attnlib.score_functions.checks import loaded_globals
from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import OPERATORS, TORCH_OPERATORS

__all__ = ["CompiledScore", "compile_score"]

_TEMPLATES: dict[str, Any] = {
    "score": device_code.apply_score,
    "score_mod": device_code.apply_score_mod,
    "mask_mod": device_code.apply_mask_mod,
}
_RAW_TEMPLATES: dict[str, Any] = {
    "score": device_code.apply_raw_score,
    "score_mod": device_code.apply_raw_score_mod,
    "mask_mod": device_code.apply_raw_mask_mod,
}
_KEEP: deque[dict[str, Any]] = deque(maxlen=1024)
"""Globals of copies: Triton identifies globals by the id of their dictionary, so that the id of a
recent one must not be reused. Functions in the cache of `compile_score` hold theirs themselves."""


class CompiledScore(NamedTuple):
    """Device functions of one score function.

    Attributes:
        apply: `apply(score, q_pos, k_pos, head, request, aux)`.
        bounds: `bounds(q_first, q_last, seq_len, request, aux)` returns one range; or None.
        ranges: `ranges(q_first, q_last, seq_len, head, request, aux)` returns all ranges of
            `ScoreFunction.bounds`; or None.
        head_ranges: all ranges of `ScoreFunction.head_bounds`, with the parameters of `ranges`; or
            None.
        apply_raw: `apply_raw(product, q_pos, k_pos, head, request, aux, inverse_scale)` takes and
            returns products q . k, not scaled; None if the function cannot or the language is not
            Gluon.
        key_slope: with the parameters of `apply_raw`, the derivative of its result by the key's
            position, if it is equal for all keys and not 0; else None.
    """

    apply: Any
    bounds: Any = None
    ranges: Any = None
    head_ranges: Any = None
    apply_raw: Any = None
    key_slope: Any = None


class _Language(NamedTuple):
    """The language that a kernel is written in."""

    module: Any
    jit: Callable[[Any], Any]


def _language(name: str) -> _Language:
    if name == "triton":
        return _Language(tl, triton.jit)
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    return _Language(gl, gluon.jit)


@functools.lru_cache(maxsize=256)
def compile_score(function: ScoreFunction | Number, language: str) -> CompiledScore:
    """The device functions of a score function.

    Args:
        function: the score function; or `KVFormat.number` (P16), which is `apply` of the result.
        language: "triton" or "gluon".

    Raises:
        UnsupportedConfigError: the source of the function is not available.
    """
    converter = _Converter(_language(language))
    if isinstance(function, tuple):
        return CompiledScore(converter.number(function))
    if not isinstance(function, ScoreFunction):
        return CompiledScore(converter.convert(function))
    fields: list[tuple[str, int | None, int | float | None]] = [
        *((name, number, None) for number, name in enumerate(function.tensor_names)),
        *((name, None, value) for name, value in function.constants),
    ]
    extra = {"FIELDS": tl.constexpr(tuple(fields))}
    # Only the Hopper prefill is bound by the instructions of every score.
    form = function.form if language == "gluon" else None
    apply = converter.template(_TEMPLATES[function.form], function.function, extra, form)
    more = {}
    if form is not None:
        for name, variant in (("apply_raw", "products"), ("key_slope", "slope")):
            if converter.convert(function.function, form, variant) is not None:
                template = _RAW_TEMPLATES[form]
                more[name] = converter.template(template, function.function, extra, form, variant)
    if function.bounds is not None:
        one = function.count_ranges() == 1
        single: Any = device_code.bound_keys if one else device_code.bound_keys_of_ranges
        more["bounds"] = converter.template(single, function.bounds, extra)
        more["ranges"] = converter.template(device_code.bound_ranges, function.bounds, extra)
    if function.head_bounds is not None:
        template = device_code.bound_head_ranges
        more["head_ranges"] = converter.template(template, function.head_bounds, extra)
    return CompiledScore(apply, **more)


class _Converter:
    """Makes device functions of Python functions, each once."""

    def __init__(self, language: _Language) -> None:
        self._language = language
        self._made: dict[Any, Any] = {}
        self._operators: dict[str, Any] = {}

    def template(
        self,
        template: Any,
        function: Callable[..., Any],
        extra: dict[str, Any],
        form: str | None = None,
        variant: str = "scores",
    ) -> Any:
        """A copy of a function of `kernels.score` that calls `function`.

        Args:
            template: the function of `kernels.score`.
            function: a Python function.
            extra: further globals of the copy.
            form, variant: see `convert`.
        """
        converted = self.convert(function, form, variant)
        values = {**template.fn.__globals__, "FUNCTION": converted, **extra}
        return self._copy(template.fn, values)

    def number(self, numbers: tuple[float, ...]) -> Any:
        """A copy of `kernels.page_formats.find_number` with these numbers."""
        template: Any = find_number.fn
        return self._copy(template, {**template.__globals__, "TABLE": tl.constexpr(numbers)})

    def convert(
        self, function: Callable[..., Any], form: str | None = None, variant: str = "scores"
    ) -> Any:
        """The device function of a Python function.

        Args:
            function: a Python function.
            form: `ScoreFunction.form` of a function whose arithmetic may be simplified, else None.
            variant: see `device_source`.

        Returns:
            The device function; None if the function has no such variant.
        """
        key = (function, form, variant)
        if key not in self._made:
            used = loaded_globals(function)
            values = {name: self._value(value) for name, value in used.items()}
            values = {"abs": self._operator("absolute"), **values}
            copy = device_source(function, used, form, variant)
            if copy is None:
                return None
            if "distance" in copy.__code__.co_names and "distance" not in used:
                values["distance"] = self._operator("distance")
            self._made[key] = self._copy(copy, values)
        return self._made[key]

    def _value(self, value: Any) -> Any:
        if isinstance(value, bool | int | float):
            return value if chips.INTERPRETED else tl.constexpr(value)
        if isinstance(value, ModuleType):
            names = TORCH_OPERATORS if value is torch else OPERATORS
            return self._module({function.__name__: name for function, name in names.items()})
        if callable(value) and (name := OPERATORS.get(value) or TORCH_OPERATORS.get(value)):
            return self._operator(name)
        return self.convert(value) if isinstance(value, FunctionType) else value

    def _module(self, names: Mapping[str, str]) -> Any:
        made = {name: self._operator(operator) for name, operator in names.items()}
        # The compiler makes deep copies of other objects, which device functions do not allow.
        module = ModuleType("operators")
        vars(module).update(made)
        return module

    def _operator(self, name: str) -> Any:
        if name not in self._operators:
            source = getattr(device_code, name).fn
            self._operators[name] = self._copy(source, dict(source.__globals__))
        return self._operators[name]

    def _copy(self, function: Any, values: dict[str, Any]) -> Any:
        """The function with other globals, as a device function."""
        values = {**values, "tl": self._language.module, "__builtins__": __builtins__}
        _KEEP.append(values)
        copy = FunctionType(function.__code__, values, function.__name__, function.__defaults__)
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        return self._language.jit(copy)
