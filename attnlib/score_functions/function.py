"""`ScoreFunction`: a Python function of scores and positions, as a value of the spec (M10)."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.score_functions.checks import check_function, check_top_level
from attnlib.score_functions.operators import observed_lookups

__all__ = ["MAX_TENSORS", "PARAMETERS", "ScoreFunction"]

MAX_TENSORS = 4
"""Auxiliary tensors of one function: kernels have this many parameters for them."""

PARAMETERS = {
    "score": ("score", "q_pos", "k_pos", "head", "request", "aux"),
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
}
"""Form of a function -> its parameters."""

_BOUNDS = ("q_first", "q_last", "seq_len", "request", "aux")
_HEAD_BOUNDS = ("q_first", "q_last", "seq_len", "head", "request", "aux")
_MOST_RANGES = 2


@dataclass(frozen=True)
class ScoreFunction:
    """A change of attention scores, after scale, soft cap and biases and before the mask (M10).

    The value is frozen, hashable and picklable: functions are pickled by their names, so they must
    be defined at the top level of a module. They are applied to single scores in a kernel and to
    whole tensors in the reference, so they consist of Python's arithmetic operators, comparisons,
    `&`, `|`, `~`, `abs`, numbers, functions of `attnlib.score_functions.operators`, and other
    functions of this kind.

    Attributes:
        function: `fn(score, q_pos, k_pos, head, request, aux)` returns the new score. `score` is
            float32, in units of the natural exponent. Positions count from the start of the
            request, `head` is a query head. `request` is the row of the request in the batch
            tensors, to be passed to `lookup` only: a batch may be computed in parts, each of which
            counts its rows from 0. -inf hides the key.
        constants: numbers by name, attributes of `aux`; part of the compiled kernel.
        layer_tensors: names of tensors that belong to a layer, attributes of `aux`, for `lookup`.
            `[n]` or `[n, m]`, contiguous, int32 or floating point.
        batch_tensors: names of tensors that belong to a batch, attributes of `aux`: `[R, m]` with
            one row per request, contiguous, int32.
        bounds: `fn(q_first, q_last, seq_len, request, aux)` returns four key positions, (first,
            last, same_first, same_last), for the queries at positions `q_first..q_last` of a
            request. Every key outside `[first, last)` is hidden from all of them by the function,
            and inside `[same_first, same_last)` the function returns every score unchanged. Bounds
            of more queries contain those of fewer: `[first, last)` may not be narrower, and
            `[same_first, same_last)` not wider. Eight positions are two such ranges: keys outside
            of both are hidden. They may overlap, and the second does not begin before the first.
            None: the function is applied to all keys.
        head_bounds: `fn(q_first, q_last, seq_len, head, request, aux)` returns the same for one
            query head, for functions whose heads see very different keys. Prefills then compute
            one head per tile; decodes share the keys of a KV head and use `bounds`.
        exact_bounds: for one query the range that is visible and the range that is unchanged are
            equal, so that the bounds define the function: prefills compare positions with them
            instead of calling it. Of `head_bounds` if the function has them, else of `bounds`.
        examples: `fn(num_heads, seq_lens)` returns valid tensors by name on the CPU, for tests.
            `attnlib verify --score` and `attnlib bench` require it if the function has tensors.
        form: parameters of `function`: "score" as above, or those of torch's `flex_attention`:
            "score_mod" (score, b, h, q_idx, kv_idx) and "mask_mod" (b, h, q_idx, kv_idx), where
            `b` is the request. A "mask_mod" returns whether the key is visible.
        needs_bidirectional: the function hides later keys itself, so the layer must have
            `mask_kind="bidirectional"`.

    Raises:
        ContractError: a function that cannot be compiled or pickled; the message names it and the
            cause.
    """

    function: Callable[..., Any]
    constants: tuple[tuple[str, int | float], ...] = ()
    layer_tensors: tuple[str, ...] = ()
    batch_tensors: tuple[str, ...] = ()
    bounds: Callable[..., Any] | None = None
    head_bounds: Callable[..., Any] | None = None
    exact_bounds: bool = False
    examples: Callable[[int, Sequence[int]], Mapping[str, Tensor]] | None = None
    form: str = "score"
    needs_bidirectional: bool = False

    def __post_init__(self) -> None:
        assign = object.__setattr__
        pairs = self.constants.items() if isinstance(self.constants, Mapping) else self.constants
        assign(self, "constants", tuple(sorted(tuple(pair) for pair in pairs)))
        for name in ("layer_tensors", "batch_tensors"):
            assign(self, name, tuple(getattr(self, name)))
        if self.form not in PARAMETERS:
            raise ContractError(
                f"form={self.form!r} of a score function must be one of {', '.join(PARAMETERS)}",
                rule="M10",
            )
        self._check_names()
        check_function(self.function, PARAMETERS[self.form])
        self._check_result()
        if self.bounds is not None:
            check_function(self.bounds, _BOUNDS)
            self.count_ranges()
        if self.head_bounds is not None:
            check_function(self.head_bounds, _HEAD_BOUNDS)
            self.count_ranges(by_head=True)
        if self.exact_bounds and self.bounds is None and self.head_bounds is None:
            raise ContractError(
                f"exact_bounds=True of score function {self}, which has no bounds: pass bounds",
                rule="M10",
            )
        if self.examples is not None:
            check_top_level(self.examples)

    def _check_result(self) -> None:
        """Refuse a function that returns a number: kernels compute tiles of scores."""
        try:
            with observed_lookups():
                result = _sample(self)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return  # it needs other arguments than these; its first call shows the error
        if not isinstance(result, Tensor):
            wanted = "whether the key is visible" if self.form == "mask_mod" else "the new score"
            shown = (
                f"the number {result!r}"
                if isinstance(result, int | float)
                else (f"a {type(result).__name__}")
            )
            raise ContractError(
                f"score function {self} returns {shown}, whatever "
                f"its arguments are: return {wanted} as an expression of them, for example "
                + ("kv_idx >= 0" if self.form == "mask_mod" else "score * 0 + 1.5"),
                rule="M10",
            )

    def _check_names(self) -> None:
        names = [*self.tensor_names, *(name for name, _ in self.constants)]
        for name in names:
            if not isinstance(name, str) or not name.isidentifier() or names.count(name) > 1:
                raise ContractError(
                    f"{name!r} must be an identifier and name one constant or tensor of the score "
                    f"function: rename it",
                    rule="M10",
                )
        for name, value in self.constants:
            if not isinstance(value, int | float):
                raise ContractError(
                    f"constant {name}={value!r} of a score function must be a number; pass tensors "
                    "as layer_tensors or batch_tensors",
                    rule="M10",
                )
        if len(self.tensor_names) > MAX_TENSORS:
            raise ContractError(
                f"a score function has {len(self.tensor_names)} tensors, and kernels take at most "
                f"{MAX_TENSORS}: store several columns in one tensor",
                rule="M10",
            )
        if self.form != "score" and names:
            raise ContractError(
                f"form={self.form!r} has no parameter for {', '.join(names)}: write the function "
                "with the parameters of form='score'",
                rule="M10",
            )

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Layer tensors, then batch tensors: the order of the parameters of kernels."""
        return self.layer_tensors + self.batch_tensors

    @property
    def reads_positions(self) -> bool:
        """Whether the result depends on positions of queries or keys: the function or its bounds
        read them."""
        return self.bounds is not None or self.head_bounds is not None or _reads_positions(self)

    def evaluate(
        self,
        score: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        head: Tensor,
        request: Any,
        tensors: Mapping[str, Tensor],
    ) -> Tensor:
        """The new scores, by torch operations.

        Args:
            score: scores in float32 or float64.
            q_pos, k_pos, head: integers that broadcast with the scores.
            request: the row of the batch tensors.
            tensors: all tensors of the function by name.
        """
        result = self._call(score, q_pos, k_pos, head, request, tensors)
        if self.form == "mask_mod":
            visible = torch.as_tensor(result)
            result = torch.where(visible.to(score.device), score, -torch.inf)
        result = torch.as_tensor(result, device=score.device).to(score.dtype)
        return result.expand(score.shape)

    def _call(
        self,
        score: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        head: Tensor,
        request: Any,
        tensors: Mapping[str, Tensor],
    ) -> Any:
        """What the function returns."""
        if self.form == "score_mod":
            return self.function(score, request, head, q_pos, k_pos)
        if self.form == "mask_mod":
            return self.function(request, head, q_pos, k_pos)
        return self.function(score, q_pos, k_pos, head, request, self.namespace(tensors))

    def namespace(self, tensors: Mapping[str, Tensor]) -> SimpleNamespace:
        """The argument `aux` of the function: constants and tensors as attributes."""
        return SimpleNamespace(
            **dict(self.constants), **{name: tensors[name] for name in self.tensor_names}
        )

    def count_tile_lookups(self) -> int:
        """Lookups that depend on the query and on the key, so that a tile of scores has as many
        results as scores."""
        return _count_tile_lookups(self)

    def count_ranges(self, by_head: bool = False) -> int:
        """Ranges of keys that the bounds return, 1 or 2; 0 without bounds.

        Args:
            by_head: of `head_bounds` instead of `bounds`.

        Raises:
            ContractError: they return neither four nor eight values.
        """
        return len(_bounds_far_from_the_start(self, by_head)) // 4

    def longest_range(self) -> int | None:
        """Most keys between the first one that `bounds` return for a query, and the last one or the
        query.

        `FAR` and more where nothing limits them. None without bounds and where they depend on the
        elements of a tensor.
        """
        bounds = _bounds_far_from_the_start(self, False)
        if not bounds or (isinstance(bounds[0], Tensor) and int(bounds[0]) <= 0):
            return None
        # A last position that a tensor has is 0 here, and not before the query.
        return max(int(bounds[1]), FAR + 1) - int(bounds[0])

    def check_tensors(
        self, tensors: Mapping[str, Tensor] | None, names: Sequence[str], owner: str
    ) -> None:
        """Check the tensors of a layer or of a batch; values are not read.

        Args:
            tensors: the given tensors by name.
            names: `layer_tensors` or `batch_tensors`.
            owner: "layer" or "batch", for messages.

        Raises:
            ContractError: a tensor is missing, or has a dtype or layout that kernels do not read.
        """
        given = tensors or {}
        if missing := [name for name in names if name not in given]:
            raise ContractError(
                f"score function {self} needs the {owner} tensor {missing[0]!r}: pass "
                f"score_tensors={{{missing[0]!r}: ...}} with the {owner}",
                rule="M10",
            )
        for name in names:
            tensor = given[name]
            integer = tensor.dtype == torch.int32
            if not integer and (owner == "batch" or not tensor.is_floating_point()):
                allowed = "int32" if owner == "batch" else "int32 or floating point"
                raise ContractError(
                    f"{owner} tensor {name!r} of score function {self} is {tensor.dtype}; it must "
                    f"be {allowed}",
                    rule="M10",
                )
            dims = (2,) if owner == "batch" else (1, 2)
            if tensor.dim() not in dims or not tensor.is_contiguous() or 0 in tensor.shape[1:]:
                raise ContractError(
                    f"{owner} tensor {name!r} of score function {self} has shape "
                    f"{tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous, "
                    + ("[requests, m]" if owner == "batch" else "[n] or [n, m]")
                    + ", with at least one column: call .contiguous()",
                    rule="M10",
                )
            if tensor.dtype.itemsize not in (2, 4) or tensor.numel() >= 1 << 31:
                raise ContractError(
                    f"{owner} tensor {name!r} of score function {self} has {tensor.numel()} "
                    f"elements of {tensor.dtype}; kernels index up to 2^31 - 1 elements of 16 or "
                    "32 bits",
                    rule="M10",
                )


FAR = 1 << 20
"""A position after which windows do not reach the first key."""


@lru_cache(maxsize=256)
def _bounds_far_from_the_start(function: ScoreFunction, by_head: bool) -> tuple[Any, ...]:
    """What the bounds return for the query at `FAR`, the last one, with zeros for lookups; ()
    without bounds."""
    bounds = function.head_bounds if by_head else function.bounds
    if bounds is None:
        return ()
    tables = dict.fromkeys(function.tensor_names, torch.zeros(1, dtype=torch.int32))
    head = (0,) if by_head else ()
    with observed_lookups():
        values = bounds(FAR, FAR, FAR + 1, *head, 0, function.namespace(tables))
    if not isinstance(values, tuple) or len(values) not in (4, 4 * _MOST_RANGES):
        found = f"{len(values)} values" if isinstance(values, tuple) else type(values).__name__
        raise ContractError(
            f"{bounds.__qualname__} returns {found}: return four key positions (first, last, "
            f"same_first, same_last), or eight for {_MOST_RANGES} ranges",
            rule="M10",
        )
    return values


@lru_cache(maxsize=256)
def _reads_positions(function: ScoreFunction) -> bool:
    """Whether the code of the function loads one of its parameters for positions."""
    first = {"score": 1, "score_mod": 3, "mask_mod": 2}[function.form]
    code = function.function.__code__
    positions = set(code.co_varnames[first : first + 2])
    for instruction in dis.get_instructions(code):
        value = instruction.argval  # a tuple for instructions that load two variables
        names = value if isinstance(value, tuple) else (value,)
        if instruction.opname.startswith("LOAD_FAST") and not positions.isdisjoint(names):
            return True
    return False


@lru_cache(maxsize=256)
def _count_tile_lookups(function: ScoreFunction) -> int:
    with observed_lookups() as shapes:
        try:
            _sample(function)
        except (RuntimeError, TypeError):
            return len(function.tensor_names)  # it needs values: count every tensor
    return sum(shape == (3, 5) for shape in shapes)


def _sample(function: ScoreFunction) -> Any:
    """What the function returns for 3 queries and 5 keys, with zeros for lookups."""
    rows, keys = torch.arange(3)[:, None], torch.arange(5)
    tables = dict.fromkeys(function.tensor_names, torch.zeros(1))
    return function._call(torch.zeros(3, 5), rows, keys, rows, 0, tables)
