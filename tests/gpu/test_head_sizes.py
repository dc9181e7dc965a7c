"""Prefills of rare head sizes on a GPU: with two accumulators, and of portable kernels.

With Triton 3.6 on Hopper some portable kernels had wrong shared memory descriptors (`head_chunks`
of `ops.triton.heuristics.tiles`): each of the property test draws below failed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.devices import needs_gpu
from tests.properties.campaign import Campaign
from tests.properties.check import run_draw
from tests.properties.draw import Draw, draw_of

pytestmark = [pytest.mark.gpu, needs_gpu]

LIMITS = Campaign(backend="triton", device="cuda").limits


def _agrees(draw: Draw) -> None:
    outcome = run_draw(draw, "triton", "cuda")
    assert not outcome.wrong and not outcome.refused


@pytest.mark.parametrize(
    ("seed", "draws_per_spec"), [(3000589, 200), (3001603, 200), (3001605, 200), (3003003, 500)]
)
def test_draws_that_failed(seed: int, draws_per_spec: int) -> None:
    _agrees(draw_of(seed, LIMITS, draws_per_spec))


@pytest.mark.parametrize("inputs", ["float8", "unaligned"])
@pytest.mark.parametrize(
    ("head_size", "head_size_v"),
    [(128, 16), (128, 32), (64, 16), (64, 32), (32, 16), (16, 128), (32, 64), (96, 96), (192, 32)],
)
def test_head_sizes(head_size: int, head_size_v: int, inputs: str) -> None:
    """With tiles that reach shared memory through registers."""
    draw = draw_of(3003003, LIMITS, 500)
    spec = replace(draw.spec, head_size=head_size, head_size_v=head_size_v)
    if inputs == "unaligned":
        spec = replace(spec, kv_cache_dtype="auto")
        draw = replace(draw, forms=replace(draw.forms, cache="misaligned", from_views=True))
    for window in (spec.window, None):
        _agrees(replace(draw, spec=replace(spec, window=window)))


@pytest.mark.parametrize(
    ("seed", "head_size", "head_size_v"),
    [
        (1318, 192, 192),
        (1185, 136, 136),  # soft cap
        (1484, 176, 176),  # sinks
        (1011, 160, 160),  # float16, 5 heads, a soft cap
        (1510, 192, 160),  # window, sinks
        (1430, 136, 192),  # queries see later keys
        (1664, 160, 160),  # ALiBi
        (1228, 192, 192),  # a tree
    ],
)
def test_keys_and_values_of_129_to_192_elements(
    seed: int, head_size: int, head_size_v: int
) -> None:
    draw = draw_of(seed, replace(LIMITS, dtypes=("bfloat16", "float16")))
    _agrees(replace(draw, spec=replace(draw.spec, head_size=head_size, head_size_v=head_size_v)))
