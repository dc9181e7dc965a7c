"""Score functions as device functions of Triton or Gluon (M10).

A Python function is compiled from a copy without type annotations, which Triton would evaluate. In
its globals, operators are replaced by their device functions, numbers by compile-time constants,
and functions that it calls by such copies.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels import score as device_code
from attnlib.score_functions.function import MAX_TENSORS, ScoreFunction
from attnlib.score_functions.operators import OPERATORS, TORCH_OPERATORS

__all__ = [
    "CompiledScore",
    "compile_score",
    "count_score_tiles",
    "score_constants",
    "score_signature",
    "score_tail",
    "tensor_sizes",
]

_TEMPLATES: dict[str, Any] = {
    "score": device_code.apply_score,
    "score_mod": device_code.apply_score_mod,
    "mask_mod": device_code.apply_mask_mod,
}
_KEEP: list[dict[str, Any]] = []
"""Globals of copies: Triton identifies globals by the id of their dictionary, so that no id may be
reused."""


class CompiledScore(NamedTuple):
    """Device functions of one score function.

    Attributes:
        apply: `apply(score, q_pos, k_pos, head, request, aux)`.
        bounds: `bounds(q_first, q_last, seq_len, request, aux)`, or None.
    """

    apply: Any
    bounds: Any


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
def compile_score(function: ScoreFunction, language: str) -> CompiledScore:
    """The device functions of a score function.

    Args:
        function: the score function.
        language: "triton" or "gluon".

    Raises:
        UnsupportedConfigError: the source of the function is not available.
    """
    fields: list[tuple[str, int | None, int | float | None]] = [
        *((name, number, None) for number, name in enumerate(function.tensor_names)),
        *((name, None, value) for name, value in function.constants),
    ]
    extra = {"FIELDS": tl.constexpr(tuple(fields))}
    converter = _Converter(_language(language))
    apply = converter.template(_TEMPLATES[function.form], function.function, extra)
    bounds = None
    if function.bounds is not None:
        bounds = converter.template(device_code.bound_keys, function.bounds, extra)
    return CompiledScore(apply, bounds)


class _Converter:
    """Makes device functions of Python functions, each once."""

    def __init__(self, language: _Language) -> None:
        self._language = language
        self._made: dict[Any, Any] = {}
        self._operators: dict[str, Any] = {}

    def template(self, template: Any, function: Callable[..., Any], extra: dict[str, Any]) -> Any:
        """A copy of a function of `kernels.score` that calls `function`."""
        values = {**template.fn.__globals__, "FUNCTION": self.convert(function), **extra}
        return self._copy(template.fn, values)

    def convert(self, function: Callable[..., Any]) -> Any:
        """The device function of a Python function."""
        if function not in self._made:
            used = inspect.getclosurevars(function).globals
            values = {name: self._value(value) for name, value in used.items()}
            values = {"abs": self._operator("absolute"), **values}
            self._made[function] = self._copy(_without_annotations(function), values)
        return self._made[function]

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
        return SimpleNamespace(**made)

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


def _without_annotations(function: Callable[..., Any]) -> Any:
    """A copy of a function whose source has no type annotations.

    Raises:
        UnsupportedConfigError: the source of the function is not available.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        raise UnsupportedConfigError(
            f"the source of score function {name} is not available, and kernels are compiled from "
            "it: define it with def in a file",
            backend="triton",
        ) from None
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)  # `ScoreFunction` has checked it
    for argument in definition.args.args:
        argument.annotation = None
    definition.returns, definition.decorator_list = None, []
    source = ast.unparse(tree) + "\n"
    # Triton reads the source of a function through `inspect`, which asks `linecache`.
    file = f"<attnlib score function {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), namespace)
    copy = namespace[definition.name]
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def count_score_tiles(params: AttentionParams) -> int:
    """`score_tiles` of `heuristics.tiles.shared_bytes` for a call."""
    function = params.score_function
    lookups = 0 if function is None else function.count_tile_lookups()
    return lookups + (params.query_bias is not None)


def score_constants(params: AttentionParams, language: str) -> dict[str, Any]:
    """The compile-time arguments of a kernel for its score function."""
    if params.score_function is None:
        return {"SCORE": None, "BOUNDS": None}
    compiled = compile_score(params.score_function, language)
    return {"SCORE": compiled.apply, "BOUNDS": compiled.bounds}


def tensor_sizes(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Rows and columns of each tensor; a tensor of one dimension has one column."""
    return tuple(size for t in tensors for size in (t.shape[0], t.shape[1] if t.dim() > 1 else 1))


def score_tail(
    layer_sizes: tuple[int, ...], batch_tensors: tuple[Tensor, ...], given: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    """The arguments of a kernel for the tensors of a score function, besides layer tensors.

    Args:
        layer_sizes: `tensor_sizes` of the layer tensors.
        batch_tensors: the batch tensors.
        given: the batch tensors as the launch takes them, tensors or addresses.

    Returns:
        (the batch tensors, the sizes of all tensors), each with None for tensors that the function
        does not have.
    """
    sizes = layer_sizes + tensor_sizes(batch_tensors)
    missing = MAX_TENSORS - len(sizes) // 2
    return (*given, *[None] * missing), (*sizes, *[None] * (2 * missing))


def score_signature(params: AttentionParams) -> tuple[Any, ...]:
    """What a launch follows from in the score function: the function and its layer tensors."""
    if params.score_function is None:
        return ()
    return params.score_function, *map(tensor_signature, params.layer_score_tensors())
