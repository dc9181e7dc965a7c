"""The benchmark of a model with state layers, with a tiny one on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks.scripts import load
from tests.integrations.transformers.test_state_mixers import pytestmark as has_state_functions
from tests.integrations.transformers.test_state_mixers import skip_in_older_releases

pytestmark = has_state_functions

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@pytest.mark.slow
def test_both_run_and_the_engine_reuses_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_in_older_releases("qwen3_next")
    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    script = load("hybrid_model")
    checked = script.check_float32("cpu", TINY)
    assert checked["passed"] and checked["tokens"] == 64 and checked["backends"] == ["torch"]
    model = script.build_model(torch.float32, "cpu", TINY)
    found = script.measure(model, script.Row(5, 120, 4, 90), 1, 64, "cpu")
    assert found["reused"] > 0
    assert found["ratio"] == pytest.approx(
        found["seconds"]["transformers"][0] / found["seconds"]["attnlib"][0]
    )
    assert "16x3000+32-common2500" in script.ROWS
    engine = script.Engine(model, script.Row(3, 120, 4), 64)
    assert engine.run() == script.run_generate(model, script.Row(3, 120, 4))
