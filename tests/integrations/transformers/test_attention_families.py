"""Latent and sparse families that no other module runs give the tokens of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.transformers.indexers import select_all_keys
from tests.integrations.transformers_sweep import tiny
from tests.integrations.transformers_sweep.trial import PROBE, installed

FAMILIES = {
    "bailing_hybrid": "BailingHybridForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen4_exp": "Qwen4ExpForCausalLM",
    "sarvam_mla": "DeepseekV3ForCausalLM",
}
SELECTING = {"glm5_next", "qwen4_exp"}
"""Families that select keys by a mask, not by lists."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_eager(family: str) -> None:
    """Forward and `generate`, with a padded row, on text. Selections matter: the eager model has
    other logits if its indexers select every key."""
    model = tiny.build(family, FAMILIES[family])
    ids = torch.randint(2, 60, (2, 19), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found: dict[str, Any] = {}
    with installed(), torch.no_grad():
        for implementation in ("eager", "attnlib"):
            model.set_attn_implementation(implementation)
            PROBE.calls = 0
            tokens = [model.generate(ids, **options)]
            tokens.append(model.generate(ids, attention_mask=mask, **options))
            found[implementation] = model(ids).logits, tokens
            assert (PROBE.calls > 0) is (implementation == "attnlib")
        model.set_attn_implementation("eager")
        assert (select_all_keys(model) > 0) is (family in SELECTING)
        everything = model(ids).logits
    (eager, eager_tokens), (ours, our_tokens) = found["eager"], found["attnlib"]
    assert (eager - ours).abs().max() < 1e-4
    assert all(torch.equal(*pair) for pair in zip(eager_tokens, our_tokens, strict=True))
    if family in SELECTING:
        assert (everything - eager).abs().max() > 0.5
