"""Results do not depend on settings of the process: torch's default device and dtype, autocast,
deterministic algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import attnlib
from attnlib.cache.indices import block_table_to_token_slots
from attnlib.metadata.state import AttentionState
from attnlib.score_functions import ScoreFunction, builtin, exp, log2, maximum, where
from attnlib.spec import MaskKind
from attnlib.testing.states.inputs import draw_tokens
from attnlib.workspace import BatchLimits
from tests.layer.test_state import GDN, arguments, batch_of, layer_of
from tests.mla.test_latent_attention import _step
from tests.properties.check import _call, _layer
from tests.properties.draw import Draw, Limits, draw_of
from tests.properties.step import place, tensors_of

LIMITS = Limits(longest=60, longest_query=20, most_heads=8)
SMALL = Limits(dtypes=("float32", "float16"), longest=30, longest_query=9, most_heads=4)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    """It also fills the memory of new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "float64": lambda: _default_dtype(torch.float64),
    "bfloat16": lambda: _default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
    "inference": torch.inference_mode,
}


def _run_draw(draw: Draw, backend: str, setting: AbstractContextManager[Any]) -> Any:
    """The result of a draw under a setting."""
    placement = place(draw, "cpu")
    tensors = tensors_of(draw, placement, "cpu", 0)
    with setting:
        chosen = attnlib.get_attn_backend(draw.spec, backend, "cpu")
        metadata = chosen.make_builder(draw.spec, "cpu").build(0, placement.common)
        layer = _layer(draw, chosen, tensors, "cpu")
        return _call(layer, tensors, metadata)


def _supported(backend: str, seed: int, limits: Limits) -> Draw:
    while True:
        draw = draw_of(seed, limits)
        if draw.forms.scales != "tensor":  # which `_layer` makes
            try:
                attnlib.get_attn_backend(draw.spec, backend, "cpu")
                return draw
            except attnlib.UnsupportedConfigError:
                pass
        seed += 1


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("triton", marks=pytest.mark.slow),
     pytest.param("prefix:torch,suffix:torch", marks=pytest.mark.slow)],
)  # fmt: skip
def test_layers(backend: str, setting: str) -> None:
    limits, count = (LIMITS, 25) if backend == "torch" else (SMALL, 6)
    for number in range(count):
        draw = _supported(backend, 50 * number, limits)
        expected, expected_lse = _run_draw(draw, backend, torch.no_grad())
        found, lse = _run_draw(draw, backend, SETTINGS[setting]())
        assert torch.equal(found, expected), draw
        assert lse is expected_lse is None or torch.equal(lse, expected_lse), draw


def _of_integers(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Integers become numbers in every operator."""
    distance = q_pos - k_pos
    bias = distance / 7 - distance * 0.3 + exp(-abs(distance)) + log2(abs(distance) + 1)
    return where(head % 2 == 0, score + bias, maximum(score, 0.1) - bias)


FUNCTIONS = {
    "integers": lambda: ScoreFunction(_of_integers),
    "relative_bias": builtin.relative_bias,
    "alibi_sqrt": builtin.alibi_sqrt,
    "documents": builtin.documents,
    "bidirectional_spans": builtin.bidirectional_spans,
    "multi_item": builtin.multi_item,
}


def _score_function_layer(name: str) -> list[torch.Tensor]:
    function = FUNCTIONS[name]()
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=8,
        mask_kind=MaskKind.BIDIRECTIONAL if "spans" in name else MaskKind.CAUSAL,
        score_function=function,
    )  # fmt: skip
    examples = {} if function.examples is None else dict(function.examples(4, [30, 9]))
    layer = attnlib.Attention(
        spec, backend="torch", device="cpu",
        score_tensors={name: examples[name] for name in function.layer_tensors},
    )  # fmt: skip
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 9], [30, 9], [[0, 1, 2, 3], [4, 5]], 8, "cpu",
        score_tensors={name: examples[name] for name in function.batch_tensors},
    )  # fmt: skip
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    cache = attnlib.PagedKVCache.allocate(spec, 6, "cpu")
    cache.key_cache.copy_(_NUMBERS.view(cache.key_cache.shape))
    cache.value_cache.copy_(_NUMBERS.flip(0).view(cache.key_cache.shape))
    return [layer(_NUMBERS[: 10 * 64].view(10, 64), None, None, cache, metadata)]


_NUMBERS = (torch.arange(6 * 8 * 2 * 16) * 0.37).sin()


def _state_layer() -> list[torch.Tensor]:
    cache = attnlib.StateCache.allocate(_STATES.spec, 4, device="cpu")
    found = []
    for first, end in ((0, 6), (6, 7)):
        part, size = _TOKENS.rows(first, end), end - first
        metadata = batch_of(_STATES, [size, 0], [end, 0], [2, -1])
        found.append(_STATES.convolve(part.x, cache, metadata))
        found.append(_STATES(*arguments(part), cache, metadata))
    states = cache.export([2], [7])
    return [*found, states.states, states.windows]


_STATES, _TOKENS = layer_of(GDN), draw_tokens(GDN, 7, 3)


def _batches() -> list[torch.Tensor]:
    """Batches, their slices and those of CUDA graphs; indices of other engines."""
    spec = attnlib.AttentionSpec(num_heads=2, head_size=16, dtype=torch.float32, block_size=4)
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=8, max_seq_len=32)
    backend = attnlib.get_attn_backend(spec, "triton", "cpu")
    state = AttentionState(backend.make_builder(spec, "cpu", limits=limits), limits)
    wide = torch.tensor([[3, 1, 2], [4, 0, 1 << 40]], dtype=torch.int64, device="cpu")
    batch = attnlib.CommonAttentionMetadata.from_lengths([1, 2], [9, 6], wide, 4, "cpu")
    padded = state.begin_forward(batch, 3, 2)
    captured = state.graph_capture_get_metadata_for_batch(3, query_len=2)
    part, empty = batch.slice_requests(1, 2), batch.slice_requests(1, 1)
    found = [batch.slot_mapping, padded.seq_lens, padded.query_start_loc_cpu, padded.seq_lens_cpu]
    found += [captured.seq_lens, part.query_start_loc, empty.query_start_loc]
    return [*found, block_table_to_token_slots(batch.block_table_tensor, batch.seq_lens, 4)]


def _latents() -> list[torch.Tensor]:
    """The absorbed form, and the expanded one over two parts of the context."""
    return [module(*given) for module, given in _LATENTS]


_LATENTS = [
    _step([1, 5], [20, 19], **options)[:2]
    for options in ({"expand_from": None}, {"expand_from": 2, "context_tokens": 8})
]

PROGRAMS: dict[str, Callable[[], list[torch.Tensor]]] = {
    **{name: lambda name=name: _score_function_layer(name) for name in FUNCTIONS},
    "states": _state_layer,
    "batches": _batches,
    "latents": _latents,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, setting: str) -> None:
    with torch.no_grad():
        expected = [x.clone() for x in PROGRAMS[name]()]
    with SETTINGS[setting]():
        found = PROGRAMS[name]()
    for one, other in zip(found, expected, strict=True):
        assert one.device == other.device and torch.equal(one, other)
