"""M11: models of transformers that select keys per query give the tokens of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import attention
from attnlib.integrations.transformers.attention import attnlib_attention
from tests.integrations.transformers.indexers import select_all_keys, select_few_keys
from tests.integrations.transformers.module_calls import Module, states
from tests.integrations.transformers_sweep import tiny
from tests.integrations.transformers_sweep.trial import installed

MODELS = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "axk2": "AXK2ForCausalLM",
    "dots3_note": "Dots3NoteForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
}


def _model(name: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model whose indexers keep 5 tokens, or 2 blocks of 4; calls with lists are counted."""
    model = tiny.build(name, MODELS[name])
    select_few_keys(model)
    attend = attention.attend_selected

    def counting(*arguments: Any) -> torch.Tensor:
        counted.append(1)
        return attend(*arguments)

    monkeypatch.setattr(attention, "attend_selected", counting)
    return model


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("deepseek_v32", "minimax_m3_vl_text")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
    ],
)  # fmt: skip
def test_tokens_are_those_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, left and right padding, and `generate` with its cache. The selection matters: the
    eager model has other logits if its indexers select every key."""
    counted: list[int] = []
    model = _model(name, counted, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 60, (2, 23), generator=generator)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :6], right[1, 17:] = 0, 0
    masks = [left, right]
    found: dict[str, Any] = {}
    with installed(), torch.no_grad():
        for implementation in ("eager", "attnlib"):
            model.set_attn_implementation(implementation)
            assert not counted  # eager attention does not come here
            logits = [model(ids).logits, *(model(ids, attention_mask=m).logits for m in masks)]
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            tokens = [model.generate(ids, **options)]
            tokens.append(model.generate(ids, attention_mask=left, **options))
            found[implementation] = logits, tokens
        assert counted
        model.set_attn_implementation("eager")
        assert select_all_keys(model) > 0
        everything = model(ids).logits
    (eager, eager_tokens), (ours, our_tokens) = found["eager"], found["attnlib"]
    for expected, actual, mask in zip(eager, ours, [torch.ones_like(ids), *masks], strict=True):
        assert (expected - actual)[mask.bool()].abs().max() < 1e-4
    assert all(torch.equal(*pair) for pair in zip(eager_tokens, our_tokens, strict=True))
    assert (everything - eager[0]).abs().max() > 1.0


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_masks_that_come_as_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compiled code, of inference mode, and of a user."""
    counted: list[int] = []
    model = _model(name, counted, monkeypatch)
    ids = torch.randint(2, 60, (2, 15), generator=torch.Generator().manual_seed(0))
    left = torch.ones_like(ids)
    left[0, :6] = 0
    causal = torch.ones(15, 15, dtype=torch.bool).tril() & left[:, None, None].bool()
    with installed(), torch.no_grad():
        expected = model(ids, attention_mask=left).logits[left.bool()]
        model.set_attn_implementation("attnlib")
        compiled = torch.compile(model, backend="eager")
        found = [
            compiled(ids, attention_mask=left).logits,
            model(ids, attention_mask=causal).logits,
        ]
        with torch.inference_mode():
            found.append(model(ids, attention_mask=left).logits)
    assert len(counted) == 3 * model.config.get_text_config().num_hidden_layers
    for logits in found:
        torch.testing.assert_close(logits[left.bool()], expected, atol=1e-4, rtol=1e-4)


def test_a_selection_changes_the_result() -> None:
    """One selected key: the output is its value; a later key shows nothing (M5)."""
    query, key, value = states()
    rows = query.shape[2]
    indices = torch.arange(rows)[None, :, None]
    out, _ = attnlib_attention(Module().eval(), query, key, value, indices=indices)
    group = query.shape[1] // key.shape[1]
    expected = value.repeat_interleave(group, dim=1)[:, :, :rows].transpose(1, 2)
    assert torch.allclose(out, expected)
    out, _ = attnlib_attention(Module().eval(), query, key, value, indices=indices + 1)
    assert not out.any()


def test_what_has_no_selection_is_refused() -> None:
    call = (Module().eval(), *states())
    rows, keys = call[1].shape[2], call[2].shape[2]
    indices = torch.zeros(1, rows, 1, dtype=torch.long)
    for arguments, message in (
        ({"attnlib_step": object()}, "in a paged cache; use generate with attn_implementation="),
        ({"write_index": torch.zeros(2)}, "in continuous batching; use generate with"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "of packed sequences"),
        ({"position_bias": torch.zeros(1, 2, rows, rows)}, "with a position bias"),
        ({"output_attentions": True}, "does not return"),
        ({"attention_mask": torch.rand(1, 1, rows, keys)}, "the mask is a tensor"),
        ({"is_causal": False}, "is not causal"),
    ):
        with pytest.raises(UnsupportedConfigError, match=message):
            attnlib_attention(*call, indices=indices, **arguments)
    with pytest.raises(UnsupportedConfigError, match=r"indices have shape \(2, 1\)"):
        attnlib_attention(*call, indices=torch.zeros(2, 1))
    with pytest.raises(UnsupportedConfigError, match="block_indices have shape"):
        attnlib_attention(*call, block_indices=indices)
