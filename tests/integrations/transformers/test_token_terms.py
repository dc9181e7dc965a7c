"""Inkling 1 and 2: biases and sinks of query tokens (M21, M22), equal eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import by_token
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.integrations.transformers.registration import register
from attnlib.integrations.transformers.token_terms import spread_bias
from tests.integrations.tiny_models import prompts
from tests.integrations.transformers.test_hybrid_model import Engine, _expected
from tests.integrations.transformers.test_state_mixers import built

pytestmark = pytest.mark.skipif(
    not hasattr(hf, "Inkling2ForCausalLM"), reason="this release of transformers has no Inkling 2"
)
NAMES = ("inkling_text", "inkling2_text")


def padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask, padded on the left."""
    width = max(lengths)
    rows = [[0] * (width - len(p)) + p for p in prompts(*lengths)]
    ids = torch.tensor(rows)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return ids, mask


def generated(model: Any, attention: str, lengths: tuple[int, ...] = (19, 3, 13)) -> Any:
    ids, mask = padded(lengths)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )


@pytest.mark.parametrize("name", NAMES)
def test_generate_equals_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels apply both terms, through windows that have left the cache and left padding."""
    register()
    model = built(name)
    expected = generated(model, "eager")
    monkeypatch.setattr(by_token, "attend_dense", None)
    found = generated(model, "attnlib")
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert len(set(found.sequences[0, 19:].tolist())) > 3


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_sequence_over_a_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several queries behind a context, of which the windowed cache has dropped the beginning."""
    register()
    model = built(name)
    ids, _ = padded((19,))
    results = []
    for kind in ("eager", "attnlib"):
        model.set_attn_implementation(kind)
        if kind == "attnlib":
            monkeypatch.setattr(by_token, "attend_dense", None)
        cache, logits = None, []
        for begin, end in ((0, 9), (9, 14), (14, 15), (15, 19)):
            with torch.no_grad():
                out = model(ids[:, begin:end], cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        results.append(torch.cat(logits, 1))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
def test_a_compiled_model() -> None:
    register()
    model = built("inkling_text")
    ids, _ = padded((19,))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation("attnlib")
        found = torch.compile(model, backend="eager")(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inkling2_loop_text", "inkling2_loop"])
def test_generate_of_the_looped_model(name: str) -> None:
    from tests.integrations.transformers_sweep import tiny

    class_name = "Inkling2LoopForCausalLM"
    if name == "inkling2_loop":
        class_name = "Inkling2LoopForConditionalGeneration"
    register()
    model = tiny.build(name, class_name).eval().float()
    expected, found = (generated(model, kind) for kind in ("eager", "attnlib"))
    assert torch.equal(found.sequences, expected.sequences)


def test_a_paged_model_refuses_the_looped_model() -> None:
    """Its layers run several times over a cache each, and a `PagedModel` has one per module."""
    from tests.integrations.transformers_sweep import tiny

    model = tiny.build("inkling2_loop_text", "Inkling2LoopForCausalLM").eval().float()
    with pytest.raises(UnsupportedConfigError, match="Inkling2LoopForCausalLM has layers of type"):
        PagedModel(model, num_blocks=8)


@pytest.mark.parametrize("name", NAMES)
def test_masks_with_gaps_and_attention_weights(name: str) -> None:
    register()
    model = built(name)
    ids, mask = padded((13, 13))
    mask[0, 9:], mask[1, 4] = 0, 0
    results = []
    for kind in ("eager", "attnlib"):
        model.set_attn_implementation(kind)
        with torch.no_grad():
            results.append(
                (
                    model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()],
                    model(ids, use_cache=False, output_attentions=True).attentions,
                )
            )
    (expected, weights), (found, found_weights) = results
    torch.testing.assert_close(found, expected)
    for a, b in zip(found_weights, weights, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_one_pool_for_windows_and_full_layers(name: str) -> None:
    model = built(name)
    engine, sequences = Engine(model, 64), prompts(17, 5)
    assert engine.generate(sequences, 6) == _expected(model, sequences, 6)
    assert {name for name in engine.paged.groups if "states" not in name} == {"window 5", "full"}


@pytest.mark.parametrize("name", NAMES)
def test_forwards_outside_of_a_step_are_those_of_transformers(name: str) -> None:
    model, (prompt,) = built(name), prompts(11)
    ids = torch.tensor([prompt])
    paged = PagedModel(model, num_blocks=16, block_size=4, backend="torch")
    register()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, use_cache=False).logits
        with paged.attached():
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_sinks_of_query_tokens_of_other_models_are_refused() -> None:
    from attnlib.integrations.transformers.attention import attnlib_attention

    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(UnsupportedConfigError, match=r"the sinks have shape \(1, 4, 3, 1\)"):
        attnlib_attention(torch.nn.Identity(), query, query, query, sinks=query[..., :1])


def test_the_bias_of_each_distance() -> None:
    bias = torch.randn(2, 3, 4, 9)
    found = spread_bias(bias, 5, 5)
    for query in range(4):
        for distance in range(5):
            column = max(5 + query - distance, 0)
            assert torch.equal(found[:, :, query, distance], bias[:, :, query, column])
