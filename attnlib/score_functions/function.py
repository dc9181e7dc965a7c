"""`ScoreFunction`: a Python function of scores and positions, as a value of the spec (M10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.score_functions.analysis import (
    FAR,
    bounds_far_from_the_start,
    count_tile_lookups_of,
    positions_are_read,
    sample,
)
from attnlib.score_functions.checks import check_function, check_top_level
from attnlib.score_functions.float32_numbers import float32_numbers
from attnlib.score_functions.operators import observed_lookups
from attnlib.score_functions.query_tensors import QUERY_ROW
from attnlib.score_functions.tensor_checks import check_names, check_score_tensors

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
            request, `head` is a query head. `request` is the row of the batch tensors, to be passed
            to `lookup` only: parts of a batch count their rows from 0. -inf hides the key.
        constants: numbers by name, attributes of `aux`; part of the compiled kernel.
        layer_tensors: names of tensors that belong to a layer, attributes of `aux`, for `lookup`.
            `[n]` or `[n, m]`, contiguous, int32 or floating point.
        batch_tensors: names of tensors that belong to a batch, attributes of `aux`: `[R, m]` with
            one row per request, contiguous, int32.
        bounds: `fn(q_first, q_last, seq_len, request, aux)` returns four key positions, (first,
            last, same_first, same_last), for the queries at positions `q_first..q_last`. Keys
            outside `[first, last)` are hidden from all of them by the function, and inside
            `[same_first, same_last)` it returns every score unchanged. For more queries,
            `[first, last)` is not narrower and `[same_first, same_last)` not wider. Eight positions
            are two such ranges: keys outside of both are hidden. They may overlap, and the second
            does not begin before the first. None: the function is applied to all keys.
        head_bounds: `fn(q_first, q_last, seq_len, head, request, aux)` returns the same for one
            query head. Prefills then compute one head per tile; decodes use `bounds`.
        exact_bounds: for one query the range that is visible and the range that is unchanged are
            equal, so that the bounds define the function: prefills compare positions with them
            instead of calling it. Of `head_bounds` if the function has them, else of `bounds`.
        examples: `fn(num_heads, seq_lens)` returns valid tensors by name on the CPU, for tests.
            `attnlib verify --score` and `attnlib bench` require it if the function has tensors.
        form: parameters of `function`: "score" as above, or those of torch's `flex_attention`:
            "score_mod" (score, b, h, q_idx, kv_idx) and "mask_mod" (b, h, q_idx, kv_idx), where
            `b` is the request. A "mask_mod" returns whether the key is visible.
        needs_bidirectional: it hides later keys itself; the layer has `mask_kind="bidirectional"`.
        in_tree: it takes positions from a batch tensor (`trees.tree_position`, M20).
        query_tensors: names of tensors of a call, attributes of `aux` (`query_tensors`, M21):
            `[T, m]`. The batch tensor `query_row` is added to `batch_tensors`.

    Raises:
        ContractError: a function that cannot be compiled or pickled; the message says why.
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
    in_tree: bool = False
    query_tensors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assign = object.__setattr__
        pairs = self.constants.items() if isinstance(self.constants, Mapping) else self.constants
        assign(self, "constants", tuple(sorted(tuple(pair) for pair in pairs)))
        for name in ("layer_tensors", "batch_tensors", "query_tensors"):
            assign(self, name, tuple(getattr(self, name)))
        if self.query_tensors and QUERY_ROW not in self.batch_tensors:
            assign(self, "batch_tensors", (*self.batch_tensors, QUERY_ROW))
        if self.form not in PARAMETERS:
            raise ContractError(
                f"form={self.form!r} of a score function must be one of {', '.join(PARAMETERS)}",
                rule="M10",
            )
        check_names(self, MAX_TENSORS)
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
                result = sample(self)
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

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Layer, query and batch tensors: the order of the parameters of kernels."""
        return self.layer_tensors + self.query_tensors + self.batch_tensors

    @property
    def reads_positions(self) -> bool:
        """Whether the result depends on positions of queries or keys: the function or its bounds
        read them."""
        return self.bounds is not None or self.head_bounds is not None or positions_are_read(self)

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
            q_pos, k_pos, head: integers that broadcast with them; request: row of batch tensors.
            tensors: all tensors of the function by name.
        """
        with float32_numbers():
            result = self._call(score, q_pos, k_pos, head, request, tensors)
        if self.form == "mask_mod":
            result = torch.where(torch.as_tensor(result, device=score.device), score, -torch.inf)
        return torch.as_tensor(result, device=score.device).to(score.dtype).expand(score.shape)

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
        """Lookups that depend on query and key: as many results as a tile has scores."""
        return count_tile_lookups_of(self)

    def count_ranges(self, by_head: bool = False) -> int:
        """Ranges of keys that the bounds return, 1 or 2; 0 without bounds.

        Args:
            by_head: of `head_bounds` instead of `bounds`.

        Raises:
            ContractError: they return neither four nor eight values.
        """
        return len(bounds_far_from_the_start(self, by_head)) // 4

    def longest_range(self) -> int | None:
        """Most keys between the first one that `bounds` return for a query, and the last one or the
        query.

        `FAR` and more where nothing limits them. None without bounds and where they depend on the
        elements of a tensor.
        """
        bounds = bounds_far_from_the_start(self, False)
        if not bounds or (isinstance(bounds[0], Tensor) and int(bounds[0]) <= 0):
            return None
        # A last position that a tensor has is 0 here, and not before the query.
        return max(int(bounds[1]), FAR + 1) - int(bounds[0])

    def check_tensors(
        self, tensors: Mapping[str, Tensor] | None, names: Sequence[str], owner: str
    ) -> None:
        """Check the tensors of a layer, batch or call; values are not read.

        Args:
            tensors: by name.
            names: those of `owner`, "layer", "batch" or "query".

        Raises:
            ContractError: a tensor is missing, or has a dtype or layout that kernels do not read.
        """
        check_score_tensors(str(self), tensors, names, owner)
