"""Small blocks, wide and odd head sizes, and soft caps: the paths of the Hopper kernels for them.

Each case takes calls of the property tests, whose lengths, strides and masks are random, and
changes the layer.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile, choose_hopper_tile
from attnlib.ops.triton.hopper import select_prefills
from tests.gpu.devices import needs_gpu
from tests.properties.campaign import Campaign
from tests.properties.check import run_draw
from tests.properties.draw import Draw, draw_of

pytestmark = [pytest.mark.gpu, needs_gpu]

LIMITS = Campaign(backend="triton", device="cuda").limits
DRAWS_PER_SPEC = 8
CASES: dict[str, dict[str, Any]] = {
    "head size 512": {"head_size": 512, "group": 8},
    "head size 320": {"head_size": 320, "group": 4, "block_size": 64},
    "blocks of 1": {"block_size": 1},
    "blocks of 2, head size 256": {"block_size": 2, "head_size": 256},
    "blocks of 4, head size 64": {"block_size": 4, "head_size": 64, "group": 8},
    "blocks of 8": {"block_size": 8},
    "head size 64, three consumers": {"head_size": 64, "group": 8},
    "head size 64, three consumers, float16": {"head_size": 64, "group": 8, "dtype": torch.float16},
    "head size 64, three consumers, soft cap 100": {"head_size": 64, "logits_soft_cap": 100.0},
    "head size 80": {"head_size": 80},
    "head size 96": {"head_size": 96, "group": 1},
    "head size 112": {"head_size": 112, "group": 7},
    "head size 192": {"head_size": 192, "group": 1, "block_size": 64},
    "soft cap 30": {"logits_soft_cap": 30.0},
    "soft cap 50, head size 256": {"logits_soft_cap": 50.0, "head_size": 256, "group": 2},
    "soft cap 100": {"logits_soft_cap": 100.0},
    "unpaged": {},
    "unpaged, head size 80": {"head_size": 80, "group": 1},
    "soft cap 30, float16": {"logits_soft_cap": 30.0, "dtype": torch.float16},
}


def _draws(seed: int, *, head_size: int = 128, group: int = 4, **changes: Any) -> list[Draw]:
    """Calls of one layer: the features of a drawn one with these sizes."""
    first = draw_of(seed, LIMITS, DRAWS_PER_SPEC)
    fields = {"dtype": torch.bfloat16, "block_size": 16, "logits_soft_cap": None, **changes}
    spec = replace(
        first.spec, head_size=head_size, head_size_v=head_size, num_heads=2 * group,
        num_kv_heads=2, kv_cache_dtype="auto", has_alibi=False, score_function=None,
        key_selection=None, **fields,
    )  # fmt: skip
    made = []
    for number in range(DRAWS_PER_SPEC):
        draw = draw_of(seed + number, LIMITS, DRAWS_PER_SPEC)
        # Shared blocks of another size might be written.
        batch, rng = replace(draw.batch, shared_blocks=0), Random(seed + number)
        if isinstance(batch.causal, tuple):
            batch = replace(batch, causal=None)
        forms = replace(
            draw.forms, cache=rng.choice(("NHD", "HND")), from_views=False,
            inputs=rng.choice(("contiguous", "fused")), output=rng.choice(("none", "contiguous")),
        )  # fmt: skip
        made.append(
            replace(
                draw, spec=spec, batch=batch, forms=forms, k_scales=(1.0,) * 2, v_scales=(1.0,) * 2
            )
        )
    return made


def _tile_of_long_prompts(*sizes: int, **options: Any) -> HopperTile:
    return choose_hopper_tile(*sizes, **{**options, "rows": None})


@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "three consumers" in name:
        # As for long prompts; the kernels of short ones have two.
        monkeypatch.setattr(select_prefills, "choose_hopper_tile", _tile_of_long_prompts)
    compared = 0
    for seed in range(9_100_000, 9_104_000, DRAWS_PER_SPEC):
        spec = draw_of(seed, LIMITS, DRAWS_PER_SPEC).spec
        if spec.use_mla or spec.batch_invariant or spec.is_paged is name.startswith("unpaged"):
            continue
        for draw in _draws(seed, **CASES[name]):
            outcome = run_draw(draw, "triton", "cuda")
            assert not outcome.wrong and not outcome.refused, (str(draw), outcome)
            compared += 1
        if compared >= 4 * DRAWS_PER_SPEC:
            return
    raise AssertionError(f"only {compared} draws were compared")
