"""Models of eager attention only, which may add their mask to the scores themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from tests.integrations.tiny_models import git, padded, prompts, run


@torch.no_grad()
def _over_a_static_cache(model: Any, call: Any, side: str | None) -> torch.Tensor:
    """Logits of a prefill at its tokens, then of two steps of `call`."""
    batch = padded(prompts(7, 4), "left") if side else padded(prompts(5, 5), "left")
    cache, mask = hf.StaticCache(config=model.config, max_cache_len=16), batch["attention_mask"]
    found = [model(**batch, past_key_values=cache).logits[mask.bool()]]
    for tokens in ([[5], [9]], [[8], [4]]):
        mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
        out = call(torch.tensor(tokens), attention_mask=mask, past_key_values=cache)
        found.append(out.logits[:, -1])
    return torch.cat(found)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_adds_the_mask_of_a_static_cache(side: str | None, compiled: bool) -> None:
    """GIT adds its mask to the scores: a bool one would add 1 to those of visible keys."""
    model = git()
    call = torch.compile(model, backend="eager") if compiled else model
    try:
        expected = run(model, "eager", lambda m: _over_a_static_cache(m, m, side))
    except TypeError as error:  # transformers 5.17 adds a length to positions that are None
        pytest.skip(f"this transformers cannot decode: {error}")
    torch.compiler.reset()
    found = run(model, "attnlib", lambda m: _over_a_static_cache(m, call, side))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
