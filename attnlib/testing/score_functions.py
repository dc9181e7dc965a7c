"""Score functions of the conformance suite, their tensors, and their evaluation for the oracle.

A case names its score function by path, so that it prints in one line and runs in other processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.object_path import load_object
from attnlib.score_functions import (
    ScoreFunction,
    absolute,
    exp2,
    lookup,
    query_row,
    sqrt,
    where,
)
from attnlib.score_functions.function import PARAMETERS
from attnlib.score_functions.query_tensors import QUERY_ROW
from attnlib.score_functions.trees import speculative_tree

__all__ = ["SUITE", "load_score_function", "make_score_tensors", "oracle_score"]


def _positions(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Differs if query and key positions are swapped."""
    return score + 0.02 * k_pos + where(k_pos % 3 == q_pos % 2, 1.0, 0.0)


def _finite(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Shows hidden keys again if it is applied after the mask; changes nothing before it."""
    return where(score > -1e6, score, 0.0)


def _linear(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Linear in the key's position, which kernels may compute with the products."""
    return score - (q_pos - k_pos) * (head + 1) * 0.007


def _heads(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score * (1.0 + 0.1 * head) - sqrt(absolute(q_pos - k_pos)) * 0.2


def _requests(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    shift = lookup(aux.shift, request, 0) + lookup(aux.weight, head)
    return score + where((k_pos + lookup(aux.shift, request, 0)) % 4 == 0, shift, 0.0)


def _empty_rows(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Hides keys, and all keys of some queries."""
    visible = ((q_pos - k_pos) % 3 != 1) & (q_pos % 5 != 4)
    return where(visible, score, float("-inf"))


def _nonlinear(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Differs if it is applied before the soft cap or before a bias."""
    return score * score * 0.1 + exp2(score * 0.25)


def _query_tokens(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    row = query_row(aux.query_row, request, q_pos)
    chosen = k_pos % 3 == lookup(aux.choice, row, 0)
    return score * lookup(aux.gain, row, head) + where(chosen, lookup(aux.weight, head), 0.0)


def _query_bias(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score + lookup(aux.bias, query_row(aux.query_row, request, q_pos), head)


def _examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.linspace(-1.0, 1.0, num_heads),
        "shift": torch.arange(len(seq_lens), dtype=torch.int32).reshape(-1, 1) % 3,
    }


def _examples_of_bias(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    rows = torch.arange(sum(seq_lens))[:, None]
    return {"bias": torch.sin(rows * 2.1 + torch.arange(num_heads) * 0.9)}


def _examples_of_tokens(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    rows = torch.arange(sum(seq_lens))[:, None]
    return {
        "weight": torch.linspace(-1.0, 1.0, num_heads),
        "gain": 1.0 + torch.sin(rows * 1.3 + torch.arange(num_heads)),
        "choice": (rows % 4).int(),
    }


POSITIONS = ScoreFunction(_positions)
LINEAR = ScoreFunction(_linear)
FINITE = ScoreFunction(_finite)
HEADS = ScoreFunction(_heads)
REQUESTS = ScoreFunction(
    _requests, layer_tensors=("weight",), batch_tensors=("shift",), examples=_examples
)
QUERY_TOKENS = ScoreFunction(
    _query_tokens,
    layer_tensors=("weight",),
    query_tensors=("gain", "choice"),
    examples=_examples_of_tokens,
)
QUERY_BIAS = ScoreFunction(_query_bias, query_tensors=("bias",), examples=_examples_of_bias)
EMPTY_ROWS = ScoreFunction(_empty_rows)
NONLINEAR = ScoreFunction(_nonlinear)
TREE = speculative_tree(window=9, chunk_size=16)
TREE_WITH_ALIBI = speculative_tree(has_alibi=True)

_HERE, _BUILTIN = "attnlib.testing.score_functions", "attnlib.score_functions.builtin"
SUITE: dict[str, tuple[str, dict[str, object]]] = {
    "positions": (f"{_HERE}:POSITIONS", {}),
    "finite": (f"{_HERE}:FINITE", {}),
    "linear": (f"{_HERE}:LINEAR", {}),
    "heads": (f"{_HERE}:HEADS", {}),
    "requests": (f"{_HERE}:REQUESTS", {}),
    "empty_rows": (f"{_HERE}:EMPTY_ROWS", {}),
    "empty_rows_with_sinks": (f"{_HERE}:EMPTY_ROWS", {"sinks": True}),
    "after_cap_and_alibi": (f"{_HERE}:NONLINEAR", {"logits_soft_cap": 2.0, "alibi": True}),
    "after_bias": (f"{_HERE}:NONLINEAR", {"mask": "query_bias"}),
    "prefix_lm": (f"{_BUILTIN}:prefix_lm", {"mask": "bidirectional"}),
    "spans": (f"{_BUILTIN}:bidirectional_spans", {"mask": "bidirectional"}),
    "documents": (f"{_BUILTIN}:documents", {}),
    "multi_item": (f"{_BUILTIN}:multi_item", {}),
    "block_diffusion": (f"{_BUILTIN}:block_diffusion", {"mask": "bidirectional"}),
    "head_windows": (f"{_BUILTIN}:head_windows", {}),
    "relative_bias": (f"{_BUILTIN}:relative_bias", {}),
    "relative_logits": (f"{_BUILTIN}:relative_logits", {}),
    "alibi_sqrt": (f"{_BUILTIN}:alibi_sqrt", {}),
    "tree": (f"{_HERE}:TREE", {"mask": "query_bias"}),
    "tree_with_alibi": (f"{_HERE}:TREE_WITH_ALIBI", {"mask": "query_bias"}),
}
"""Name -> path of the function, fields of the case."""


@cache
def load_score_function(path: str) -> ScoreFunction:
    """The score function at `module:name` or `path/to/file.py:name`.

    The name denotes a `ScoreFunction`, a function with the parameters of one, or a function without
    required parameters that returns one.

    Raises:
        ContractError: the object is none of these, there is no object at the path, or its module
            cannot be imported.
    """
    try:
        found = load_object(path)
    except ContractError:
        raise
    except Exception as error:
        raise ContractError(
            f"{path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, ScoreFunction):
        return found
    if inspect.isfunction(found):
        parameters = inspect.signature(found).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty]
        for form, names in PARAMETERS.items():
            if len(required) == len(names) and len(parameters) == len(names):
                if form == "score" or tuple(required) == names:
                    return ScoreFunction(found, form=form)
        if not required and isinstance(made := found(), ScoreFunction):
            return made
    raise ContractError(
        f"{path} is {found!r}: give a ScoreFunction, a function "
        f"({', '.join(PARAMETERS['score'])}), or a function without required parameters that "
        "returns a ScoreFunction",
        rule="M10",
    )


def make_score_tensors(
    function: ScoreFunction,
    num_heads: int,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors for a score function, on the CPU.

    Args:
        function: the function.
        num_heads: Hq.
        seq_lens, query_lens: of the requests; without query lengths, requests have no context.

    Raises:
        ContractError: the function has tensors and no `examples`.
    """
    if not function.tensor_names:
        return {}
    if function.examples is None:
        raise ContractError(
            f"score function {function} has the tensors {', '.join(function.tensor_names)}: give "
            "it examples=fn, with fn(num_heads, seq_lens) returning valid tensors by name",
            rule="M10",
        )
    # Query tensors have a row per query token, of which long contexts have few.
    few = query_lens is not None and function.batch_tensors == (QUERY_ROW,)
    lengths = query_lens if few and query_lens is not None else seq_lens
    made = dict(function.examples(num_heads, list(lengths)))
    if function.query_tensors:
        rows = accumulate(query_lens or seq_lens)  # the row after the last one of each request
        first = [[end - length] for end, length in zip(rows, seq_lens, strict=True)]
        made[QUERY_ROW] = torch.tensor(first, dtype=torch.int32).reshape(-1, 1)
    return {name: made[name] for name in function.tensor_names}


def oracle_score(
    function: ScoreFunction, tensors: Mapping[str, torch.Tensor], device: torch.device | str
) -> Callable[..., torch.Tensor]:
    """The function in the form that the oracle calls (`OracleParams.score`).

    Shares no code with the evaluation by the torch backend (`ScoreFunction.evaluate`).
    """
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    aux = SimpleNamespace(**moved, **dict(function.constants))

    def score(
        request: int,
        scores: torch.Tensor,
        q_pos: torch.Tensor,
        k_pos: torch.Tensor,
        head: torch.Tensor,
    ) -> torch.Tensor:
        if function.form == "score":
            changed = function.function(scores, q_pos, k_pos, head, request, aux)
        elif function.form == "score_mod":
            changed = function.function(scores, request, head, q_pos, k_pos)
        else:
            visible = function.function(request, head, q_pos, k_pos)
            changed = scores + torch.zeros_like(scores).masked_fill(~visible, -torch.inf)
        return torch.as_tensor(changed, dtype=scores.dtype, device=scores.device)

    return score
