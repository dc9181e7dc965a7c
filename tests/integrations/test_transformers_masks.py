"""Masks: what padding can say goes to kernels, what it cannot is evaluated or refused, and nothing is dropped or kept too long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers import plain
from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.integrations.transformers.masks import StepMask, attnlib_mask, read_mask
from attnlib.integrations.transformers.patterns import recognise
from attnlib.spec import Window
from tests.integrations.tiny_models import decoder, difference, padded, prompts, run


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The ways that layers went, in order."""
    taken: list[str | None] = []
    route = plain._route

    def watching(step: StepMask) -> str | None:
        taken.append(route(step))
        return taken[-1]

    monkeypatch.setattr(plain, "_route", watching)
    return taken


def test_patterns_are_read_from_transformers_own_functions() -> None:
    """Every maker of transformers' that a kernel has an argument for is recognised; anything with a part of another kind is not."""
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    assert recognise(causal) == (True, Window(None, 0), None, None)
    assert recognise(both) == (False, Window(), None, None)
    assert recognise(masking_utils.sliding_window_causal_mask_function(4)) == (
        True,
        Window(3, 0),
        None,
        None,
    )
    assert recognise(masking_utils.sliding_window_bidirectional_mask_function(4)) == (
        False,
        Window(4, 4),
        None,
        None,
    )
    assert recognise(
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    ) == (True, Window(None, 0), 4, None)
    segments = torch.tensor([[0, 0, 1]])
    packed = recognise(
        masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(segments))
    )
    assert packed is not None and packed.segments is segments and not packed.is_plain
    assert recognise(masking_utils.or_masks(causal, both)) is None
    assert recognise(masking_utils.and_masks(causal, lambda b, h, q, k: k != 2)) is None


@pytest.mark.parametrize("window", [1, 3, 20])
def test_patterns_mean_what_their_functions_say(window: int) -> None:
    """M2: the pattern's own evaluation equals transformers' evaluation of the function it was read from."""
    keep = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    for function in (
        masking_utils.sliding_window_causal_mask_function(window),
        masking_utils.sliding_window_bidirectional_mask_function(window),
    ):
        step = read_mask(attnlib_mask(2, 6, 6, mask_function=function, attention_mask=keep))
        assert step is not None
        own = StepMask(step.pattern, 2, 6, 6, attention_mask=keep)
        assert torch.equal(own.dense(), step.dense())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_do_not_see_each_other(
    name: str, backend: str, routes: list[str | None]
) -> None:
    """Several sequences in one row, told by position_ids alone."""
    ids, positions = torch.tensor(prompts(9)), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    model = decoder(name)
    call = lambda m: m(ids, position_ids=positions, use_cache=False).logits  # noqa: E731
    assert difference(model, call) < 2e-5
    assert set(routes) == {"unpaged"}
    whole = run(model, "attnlib", lambda m: m(ids, use_cache=False).logits)
    assert float((run(model, "attnlib", call) - whole).abs().max()) > 1e-2


def test_packed_sequences_told_by_the_caller(routes: list[str | None]) -> None:
    """cu_seq_lens_q, the FlashAttention keyword, says the same as position_ids, also where a cache keeps transformers from looking at those."""
    ids, positions = torch.tensor(prompts(9)), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    starts, model = torch.tensor([0, 4, 6, 9], dtype=torch.int32), decoder("mistral")
    expected = run(model, "eager", lambda m: m(ids, position_ids=positions, use_cache=False).logits)
    found = run(
        model, "attnlib", lambda m: m(ids, position_ids=positions, cu_seq_lens_q=starts).logits
    )
    assert float((found - expected).abs().max()) < 2e-5
    assert set(routes) == {"unpaged"}
    with pytest.raises(
        ContractError, match=r"cu_seq_lens_q=\[0, 4, 6, 8\].*rise from 0 to the length"
    ):
        run(
            model,
            "attnlib",
            lambda m: m(ids, position_ids=positions, cu_seq_lens_q=starts.clamp(max=8)),
        )


@pytest.mark.parametrize("as_float", [True, False])
def test_a_users_own_mask_is_honoured(as_float: bool, backend: str) -> None:
    """A 4-D mask, bool or added, that no padding could say."""
    ids = torch.tensor(prompts(7, 7))
    mask = (torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.4) | torch.eye(
        7, dtype=torch.bool
    )
    model, added = decoder("llama"), torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = run(model, "eager", lambda m: m(ids, attention_mask=added).logits)
    found = run(
        model, "attnlib", lambda m: m(ids, attention_mask=added if as_float else mask).logits
    )
    assert float((found - expected).abs().max()) < 2e-5
    assert float((run(model, "attnlib", lambda m: m(ids).logits) - expected).abs().max()) > 1e-2


def test_spans_that_see_each_other_are_honoured(backend: str, routes: list[str | None]) -> None:
    """Image spans (Gemma 3 and others): a union of masks is evaluated, not taken for a causal one."""
    model, ids = decoder("llama"), torch.tensor(prompts(7, 7))
    spans = torch.tensor([[-1, 0, 0, 0, -1, -1, -1], [-1, -1, -1, -1, 1, 1, -1]])
    inputs = model.get_input_embeddings()(ids)

    def in_spans(m: Any) -> torch.Tensor:
        mask = masking_utils.create_causal_mask(
            m.config, inputs, None, None, block_sequence_ids=spans
        )
        return m(ids, attention_mask=mask, use_cache=False).logits

    assert difference(model, in_spans) < 2e-5
    assert set(routes) == {None}
    assert (
        float(
            (run(model, "attnlib", in_spans) - run(model, "attnlib", lambda m: m(ids).logits))
            .abs()
            .max()
        )
        > 1e-2
    )


def test_holes_in_a_row(backend: str, routes: list[str | None]) -> None:
    """Padding between tokens: left out where order is all that counts, and evaluated where distances count the hole."""
    batch = padded(prompts(8, 8), "left")
    batch["attention_mask"][0, 3:5] = 0
    for name, expected in (("llama", None), ("mistral", None)):
        assert (
            difference(decoder(name), lambda m: m(**batch).logits, batch["attention_mask"]) < 2e-5
        )
        assert set(routes) == {expected}
        routes.clear()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_same_mask_object_with_other_contents(name: str) -> None:
    """Nothing derived from a mask outlives its step, even when the caller rewrites one tensor in place."""
    model, batch = decoder(name), padded(prompts(8, 5, 3), "left")
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        first = model(ids, attention_mask=mask).logits
        mask.fill_(True)
        second = model(ids, attention_mask=mask).logits
    assert float((second - first).abs().max()) > 1e-2
    assert (
        float(
            (second - run(model, "eager", lambda m: m(ids, attention_mask=mask).logits)).abs().max()
        )
        < 2e-5
    )


def test_metadata_is_built_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, one build; the next step builds again."""
    from attnlib.backends.torch.metadata import TorchMetadataBuilder

    monkeypatch.setenv("ATTNLIB_BACKEND", "torch")
    builds = []
    build = TorchMetadataBuilder.build
    monkeypatch.setattr(
        TorchMetadataBuilder,
        "build",
        lambda self, *args, **kwargs: builds.append(1) or build(self, *args, **kwargs),
    )
    model, batch = decoder("llama"), padded(prompts(8, 5), "left")
    for steps in (1, 2):
        run(model, "attnlib", lambda m: m(**batch).logits)
        assert len(builds) == steps


def test_a_description_that_was_lost_is_refused() -> None:
    """A copy drops the description: padding stays right without it, anything else is refused rather than taken for causal."""
    packed = masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.zeros(1, 4)),
    )
    with pytest.raises(ContractError, match="description of this attention mask was lost.*sdpa"):
        read_mask(attnlib_mask(1, 4, 4, mask_function=packed).clone())
    plain_copy = attnlib_mask(
        1, 4, 4, attention_mask=torch.tensor([[False, True, True, True]])
    ).clone()
    assert read_mask(plain_copy) is None and plain_copy.tolist() == [[False, True, True, True]]


def _states(queries: int = 3, keys: int = 3, heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, heads, length, 8, generator=generator) for length in (queries, keys, keys)
    )


class _Module(torch.nn.Module):
    is_causal = True
    layer_idx = 7


def test_a_mask_of_another_layer_is_refused() -> None:
    """The message gives both shapes."""
    with pytest.raises(ContractError, match=r"\(1, 3, 3\).*made for \(1, 3, 5\)"):
        attnlib_attention(_Module(), *_states(), attnlib_mask(1, 3, 5, q_offset=2))
    with pytest.raises(ContractError, match=r"attention_mask has shape \(1, 9\).*up to 3"):
        attnlib_attention(_Module(), *_states(), torch.ones(1, 9, dtype=torch.bool))
    with pytest.raises(ContractError, match=r"attention_mask has shape \(2, 1, 3, 3\)"):
        attnlib_attention(_Module(), *_states(), torch.ones(2, 1, 3, 3, dtype=torch.bool))


def test_a_module_alone_says_causal_window_and_cap() -> None:
    """Without a mask function the layer's own arguments count: is_causal, sliding_window (the query's own key among the W), softcap, s_aux."""
    query, key, value = _states(queries=2, keys=6)
    sinks = torch.tensor([0.3, -0.2])
    out, weights = attnlib_attention(
        _Module(),
        query,
        key,
        value,
        None,
        scaling=0.5,
        sliding_window=3,
        softcap=1.5,
        s_aux=sinks,
        output_attentions=True,
    )
    scores = torch.tanh(query @ key.transpose(2, 3) * 0.5 / 1.5) * 1.5
    position, keys = torch.tensor([[4], [5]]), torch.arange(6)
    scores = scores.masked_fill(~((keys <= position) & (keys > position - 3)), -torch.inf)
    expected = torch.softmax(
        torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 2, 1)], -1), -1
    )[..., :-1]
    assert weights is not None and torch.allclose(weights, expected, atol=1e-6)
    assert torch.allclose(out, (expected @ value).transpose(1, 2), atol=1e-6)


def test_attentions_are_returned_when_asked_for() -> None:
    """output_attentions=True: the weights of every layer, as eager has them; None otherwise."""
    model, batch = decoder("gemma2"), padded(prompts(8, 5), "left")
    real = batch["attention_mask"].bool()
    ours, eagers = (
        run(model, name, lambda m: m(**batch, output_attentions=True).attentions)
        for name in ("attnlib", "eager")
    )
    assert len(ours) == len(eagers) == 2
    for layer in range(2):
        gap = (ours[layer] - eagers[layer]).abs().amax(dim=(1, 3))
        assert float(gap[real].max()) < 1e-5
    assert attnlib_attention(_Module(), *_states())[1] is None


def test_training_is_refused() -> None:
    """Inference only: dropout, training mode with gradients, and any attempt to differentiate."""
    with pytest.raises(UnsupportedConfigError, match="_Module.7: dropout=0.1.*inference only"):
        attnlib_attention(_Module(), *_states(), dropout=0.1)
    wanted = tuple(tensor.requires_grad_() for tensor in _states())
    with pytest.raises(UnsupportedConfigError, match="gradients are wanted in training mode"):
        attnlib_attention(_Module(), *wanted)
    out, _ = attnlib_attention(_Module().eval(), *wanted)
    with pytest.raises(UnsupportedConfigError, match="no gradient"):
        out.sum().backward()


def test_a_sparse_selection_of_keys_is_refused() -> None:
    """An argument that picks keys per query must not be ignored."""
    with pytest.raises(UnsupportedConfigError, match="indices= selects keys per query"):
        attnlib_attention(_Module(), *_states(), indices=torch.zeros(1, 3, 2))


def test_a_backend_that_was_insisted_on_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias per head is torch's alone; with triton asked for by name that is an error, not a quiet switch."""
    pytest.importorskip("triton")
    bias = torch.zeros(1, 2, 3, 3)
    attnlib_attention(_Module(), *_states(), position_bias=bias)
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    with pytest.raises(
        UnsupportedConfigError,
        match="_Module.7.*ATTNLIB_BACKEND insists on triton.*'torch' or 'auto'",
    ):
        attnlib_attention(_Module(), *_states(), position_bias=bias)


def test_the_backend_can_change_between_calls() -> None:
    """`use_backend` and ATTNLIB_BACKEND count at every call, not only at a module's first; the layer carries the module's name."""
    pytest.importorskip("triton")
    import attnlib
    from attnlib.integrations.transformers import layers

    module = _Module()
    for name in ("torch", "triton", "torch"):
        with attnlib.use_backend(name):
            attnlib_attention(module, *_states())
        (entry,) = layers._layers[module].values()
        assert (entry.layer.backend.get_name(), entry.layer.prefix) == (name, "_Module.7")


def test_rewritten_sinks_are_read_again() -> None:
    """Sinks are part of the weights: loading others into the same tensor takes effect."""
    module, sinks = _Module(), torch.tensor([0.0, 0.0])
    before, _ = attnlib_attention(module, *_states(), s_aux=sinks)
    sinks.copy_(torch.tensor([5.0, 5.0]))
    after, _ = attnlib_attention(module, *_states(), s_aux=sinks)
    assert float((before - after).abs().max()) > 0.1
