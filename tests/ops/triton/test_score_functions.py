"""Score functions in the portable kernels, under the interpreter: functions of models, and
functions that are drawn from a grammar (M10)."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.errors import UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill as torch_prefill
from attnlib.ops.triton.launch.score_compile import compile_score
from attnlib.ops.triton.paged_prefill import paged_prefill
from attnlib.score_functions import ScoreFunction, builtin, where
from attnlib.testing.case import Case
from attnlib.testing.runner import compare_with_oracle, run_case
from attnlib.testing.score_functions import SUITE, load_score_function

FP8 = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5}
PHASES: dict[str, dict[str, Any]] = {
    "prefill": {"batch": "q21s37_q5"},
    "decode": {"batch": "q1s37_q3s20_q1s1"},
    "splits": {"batch": "q1s331_q1s7"},
    "mixed": {"batch": "q1s30_q2s18_q19s23"},
    "fp8": {"batch": "q1s37_q18s24", **FP8},
}
WINDOWED_SPANS = builtin.bidirectional_spans(window=6)
CLOSED_DOCUMENTS = builtin.documents(causal=False)
BUILTINS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: found for name, found in SUITE.items() if "builtin" in found[0]},
    "windowed_spans": (f"{__name__}:WINDOWED_SPANS", {"mask": "bidirectional"}),
    "closed_documents": (f"{__name__}:CLOSED_DOCUMENTS", {"mask": "bidirectional"}),
}


def _check(device: torch.device, path: str, **fields: Any) -> None:
    case = Case(**{"head_size": 32, "score": path, **fields})
    error = compare_with_oracle(case, run_case(TritonBackend, case, device), device)
    assert not error, error


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", BUILTINS)
def test_functions_of_models(device: torch.device, name: str, phase: str) -> None:
    """M10: against float64, in each kernel."""
    path, fields = BUILTINS[name]
    _check(device, path, **PHASES[phase], **fields)


def test_a_function_in_each_kernel(device: torch.device) -> None:
    """The same for one function with both kinds of tensors, in the fast selection."""
    for fields in PHASES.values():
        _check(device, SUITE["requests"][0], **fields)


def _expression(draw: random.Random, depth: int) -> str:
    """A number for each score: positions and heads in arithmetic, and conditions."""
    if depth == 0:
        scaled = ("q_pos", "k_pos", "head")
        return draw.choice([*(f"{name} * {draw.randint(1, 9) / 64}" for name in scaled), "score"])
    a, b = _expression(draw, depth - 1), _expression(draw, depth - 1)
    number = draw.randint(2, 5)
    return draw.choice(
        [
            f"({a} + {b})",
            f"({a} - {b})",
            f"({a}) * {number / 8}",
            f"where({_condition(draw)}, {a}, {b})",
            f"minimum({a}, {b})",
            f"abs({a})",
            f"sqrt(abs({a}))",
            f"exp2(minimum({a}, 2.0))",
        ]
    )


def _condition(draw: random.Random) -> str:
    left, number = draw.choice(["q_pos", "k_pos", "(q_pos + k_pos)", "head"]), draw.randint(2, 5)
    simple = f"({left} % {number} == {draw.randint(0, number - 1)})"
    return draw.choice(
        [simple, f"(k_pos // {number} != q_pos // 7)", f"({simple} | (q_pos - k_pos < {number}))"]
    )


def drawn_source(seed: int) -> str:
    """A module with a score function `drawn`; every third one hides keys."""
    draw = random.Random(seed)
    changed = f"score + {_expression(draw, 3)}"
    if seed % 3 == 0:
        changed = f'where({_condition(draw)}, {changed}, float("-inf"))'
    return (
        "from attnlib.score_functions import exp2, minimum, sqrt, where\n\n\n"
        "def drawn(score, q_pos, k_pos, head, request, aux):\n"
        f"    return {changed}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_drawn_functions(device: torch.device, seed: int, tmp_path: Path) -> None:
    """M10: eight functions of a small grammar, against float64, in each kernel."""
    file = tmp_path / f"drawn_score_function_{seed}.py"
    file.write_text(drawn_source(seed))
    for fields in PHASES.values():
        _check(device, f"{file}:drawn", **fields)


SHIFT = 2
OFFSET = 0.25


def helper(distance: Any) -> Any:
    return distance * OFFSET


def with_helper(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score - helper(abs(q_pos - k_pos - SHIFT))


def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx - kv_idx < 9, score, score - 0.5 * h - torch.abs(q_idx - kv_idx) * 0.1)


def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx < 7) | (kv_idx % 4 == h)


FLEX = {
    "helper": f"{__name__}:with_helper",
    "score_mod": f"{__name__}:score_mod",
    "mask_mod": f"{__name__}:mask_mod",
}


@pytest.mark.parametrize("name", FLEX)
def test_helpers_numbers_and_signatures_of_flex_attention(device: torch.device, name: str) -> None:
    """Functions that it calls, global numbers, functions of torch and other signatures."""
    for phase in ("prefill", "splits"):
        _check(device, FLEX[name], **PHASES[phase])


def test_a_function_is_compiled_once() -> None:
    """Equal functions share their device functions, and so their kernels."""
    first, second = (load_score_function(FLEX["helper"]) for _ in range(2))
    assert compile_score(first, "triton") is compile_score(second, "triton")


def test_a_function_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": __name__}
    exec("def typed(score, q_pos, k_pos, head, request, aux):\n    return score", namespace)
    globals()["typed"] = namespace["typed"]
    with pytest.raises(UnsupportedConfigError, match="the source of score function .*typed is not"):
        compile_score(ScoreFunction(namespace["typed"]), "triton")


QUERIES, KEYS, PREFIX, ITEM = 40, 700, 130, 560
"""Tokens of a request whose last item starts at ITEM; the keys from PREFIX to ITEM are hidden."""


def _prefill(
    device: torch.device, function: ScoreFunction, tensors: dict[str, torch.Tensor], hidden: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last QUERIES tokens by the portable kernel, over NaN in `hidden`, and by torch."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(QUERIES, 4, 32, generator=draw)
    keys, values = torch.randn(2, KEYS, 1, 2, 32, generator=draw).unbind()
    starts, lengths = torch.tensor([0, QUERIES]).int(), torch.tensor([KEYS]).int()
    table = torch.arange(KEYS, dtype=torch.int32)[None]
    params = AttentionParams(scale=0.2, score_function=function, score_tensors=tensors)
    outs = []
    for operation in (torch_prefill, paged_prefill):
        out = torch.full_like(query, math.nan)
        arguments = (query, keys, values, table, starts, lengths, params)
        moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
        operation(*moved, max_query_len=QUERIES, max_seq_len=KEYS, out=out)
        outs.append(out)
        keys[hidden], values[hidden] = math.nan, math.nan
    return outs[0], outs[1]


def test_tiles_between_two_ranges_are_not_read(device: torch.device) -> None:
    """M10: a value of NaN in any tile that is visited would make the output NaN."""
    begin = torch.zeros(1, KEYS, dtype=torch.int32)
    begin[:, PREFIX:ITEM], begin[:, ITEM:] = PREFIX, ITEM
    tensors = {"prefix_len": torch.tensor([[PREFIX]], dtype=torch.int32), "item_begin": begin}
    # A tile has at most 128 keys.
    expected, out = _prefill(device, builtin.multi_item(), tensors, slice(256, 512))
    assert torch.allclose(out, expected, atol=2e-5)


def _last_window_bounds(
    q_first: Any, q_last: Any, seq_len: Any, head: Any, request: Any, aux: Any
) -> Any:
    window = where(head == 3, 500, 0) + 4
    return q_first - window + 1, seq_len, q_last - window + 1, seq_len


def last_window(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    window = where(head == 3, 500, 0) + 4
    return where(q_pos - k_pos < window, score, float("-inf"))


def test_a_tile_has_one_head_where_heads_have_bounds(device: torch.device) -> None:
    """M10: only the last head reads the keys that the others do not see."""
    function = ScoreFunction(last_window, head_bounds=_last_window_bounds)
    expected, out = _prefill(device, function, {}, slice(300, 500))
    assert torch.allclose(out[:, :3], expected[:, :3], atol=2e-5)
    assert bool(out[:, 3].isnan().all())


def _near(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return where(q_pos - k_pos < 4 + head, score, float("-inf"))


def _near_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return q_first - 6, seq_len, q_last - 3, seq_len


NEAR = ScoreFunction(_near, bounds=_near_bounds)
NOT_EXACT = ScoreFunction(_near, bounds=_near_bounds, exact_bounds=True)


def test_bounds_that_are_wrongly_called_exact_are_detected(device: torch.device) -> None:
    """Prefills compare positions with exact bounds, so that the oracle, which does not, differs."""
    case = {"batch": "q21s37_q5"}
    _check(device, f"{__name__}:NEAR", **case)
    with pytest.raises(AssertionError, match="differ|error|max"):
        _check(device, f"{__name__}:NOT_EXACT", **case)
