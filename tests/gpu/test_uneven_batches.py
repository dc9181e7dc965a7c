"""Decodes of more requests than the Hopper decode has tile ranges, of very unequal lengths."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from attnlib.bench.backends import find_backends
from attnlib.bench.case import BenchCase
from attnlib.bench.correctness import CorrectnessCheck
from attnlib.bench.inputs import make_inputs
from attnlib.bench.runner import make_runner
from attnlib.testing.batch_spec import BatchSpec
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

LAYERS: dict[str, dict[str, Any]] = {
    "32/8 heads": {},
    "28/4 heads": {"num_heads": 28, "num_kv_heads": 4},
    "head size 64, sinks": {"num_heads": 64, "head_size": 64, "sinks": True},
    "one KV head, window": {"num_heads": 8, "num_kv_heads": 1, "sliding_window": 200},
    "blocks of 8, head size 256": {"num_heads": 16, "head_size": 256, "block_size": 8},
}


def _batch(rng: Random) -> BatchSpec:
    count = rng.choice((17, 40, 140, 300))
    lengths = [rng.choice((1, 17, 130, 500, 900)) for _ in range(count)]
    for index in rng.sample(range(count), 3):
        lengths[index] = rng.randrange(1000, 9000)
    tokens = [rng.choice((1, 1, 3)) for _ in range(count)]
    return BatchSpec(tuple(tokens), tuple(map(max, lengths, tokens)))


@pytest.mark.parametrize("layer", LAYERS)
@torch.inference_mode()
def test_uneven_decodes_agree(layer: str) -> None:
    device = torch.device("cuda")
    (triton,) = find_backends(["triton"], device)
    for seed in range(8):
        case = BenchCase(name=f"seed {seed}", batch=_batch(Random(seed)), **LAYERS[layer])
        inputs = make_inputs(case, device)
        runner = make_runner(case, triton, inputs)
        runner.attend(0)  # counters are left as they were found
        found = CorrectnessCheck(inputs).output(inputs.output)
        assert found.passed, f"{case.batch}: {found}"
