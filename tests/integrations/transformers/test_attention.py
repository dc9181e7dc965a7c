"""The attention function: arguments that it applies, and calls that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from transformers import DynamicCache

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.attention import attnlib_attention
from attnlib.integrations.transformers.masks import attnlib_mask
from tests.integrations.tiny_models import decoder, padded, prompts, run
from tests.integrations.transformers.module_calls import Module, states


def test_a_mask_of_another_layer_is_refused() -> None:
    """The message gives both shapes."""
    with pytest.raises(ContractError, match=r"\(1, 3, 3\).*made for \(1, 3, 5\)"):
        attnlib_attention(Module(), *states(), attnlib_mask(1, 3, 5, q_offset=2))
    with pytest.raises(ContractError, match=r"attention_mask has shape \(1, 9\).*up to 3"):
        attnlib_attention(Module(), *states(), torch.ones(1, 9, dtype=torch.bool))
    with pytest.raises(ContractError, match=r"attention_mask has shape \(2, 1, 3, 3\)"):
        attnlib_attention(Module(), *states(), torch.ones(2, 1, 3, 3, dtype=torch.bool))


def test_arguments_of_a_layer_without_a_mask() -> None:
    """is_causal, sliding_window, softcap and s_aux apply without a mask."""
    query, key, value = states(queries=2, keys=6)
    sinks = torch.tensor([0.3, -0.2])
    out, weights = attnlib_attention(
        Module(),
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


def test_attentions_are_returned_on_request() -> None:
    """output_attentions=True: the weights of every layer equal those of eager; else None."""
    model, batch = decoder("gemma2"), padded(prompts(8, 5), "left")
    real = batch["attention_mask"].bool()
    ours, eagers = (
        run(model, name, lambda m: m(**batch, output_attentions=True).attentions)
        for name in ("attnlib", "eager")
    )
    assert len(ours) == len(eagers) == 2
    for layer in range(2):
        error = (ours[layer] - eagers[layer]).abs().amax(dim=(1, 3))
        assert float(error[real].max()) < 1e-5
    assert attnlib_attention(Module(), *states())[1] is None


def test_training_is_refused() -> None:
    """Dropout, training mode with gradients, and backward are refused."""
    with pytest.raises(UnsupportedConfigError, match="Module.7: dropout=0.1.*inference only"):
        attnlib_attention(Module(), *states(), dropout=0.1)
    required = tuple(tensor.requires_grad_() for tensor in states())
    with pytest.raises(UnsupportedConfigError, match="gradients are required in training mode"):
        attnlib_attention(Module(), *required)
    out, _ = attnlib_attention(Module().eval(), *required)
    with pytest.raises(UnsupportedConfigError, match="no gradient"):
        out.sum().backward()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.vmap(f)(x[None]),
    ],
)
def test_transforms_of_functions_are_refused(transform: Any) -> None:
    """Kernels read the memory below the tensors, which has no transform."""
    model = decoder("mistral")
    model.set_attn_implementation("attnlib")
    with pytest.raises(UnsupportedConfigError, match="Attention.0: .* a transform of torch.func"):
        transform(lambda x: model(inputs_embeds=x).logits, torch.ones(1, 7, 32))


@torch.no_grad()
def test_tangents_are_refused(backend: str) -> None:
    """Forward-mode gradients, which kernels would omit, in prefills and after known decodes."""
    model, cache = decoder("llama"), DynamicCache()
    model.set_attn_implementation("attnlib")
    for _ in range(3):
        model(inputs_embeds=torch.ones(1, 1, 32), past_key_values=cache)
    for given in (cache, None):
        with forward_ad.dual_level(), pytest.raises(UnsupportedConfigError, match="a tangent"):
            token = forward_ad.make_dual(torch.ones(1, 1, 32), torch.ones(1, 1, 32))
            model(inputs_embeds=token, past_key_values=given)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_tensors_without_values_are_refused(first: int) -> None:
    """The device `meta`, whose models tell sizes."""
    tensors = list(states())
    tensors[first:] = [tensor.to("meta") for tensor in tensors[first:]]
    with pytest.raises(UnsupportedConfigError, match="Module.7: .* on the device 'meta'.*'eager'"):
        attnlib_attention(Module(), *tensors)


OTHER_STATES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "fewer values": lambda q, k, v: (q, k, v[:, :, :2].contiguous()),
    "more values": lambda q, k, v: (q, k, torch.cat((v, v), 2)),
    "values of other heads": lambda q, k, v: (q, k, v[:, :1]),
    "values of another dtype": lambda q, k, v: (q, k, v.bfloat16()),
    "keys of another batch": lambda q, k, v: (torch.cat((q, q)), k, v),
    "values of another batch": lambda q, k, v: (q, k, torch.cat((v, v))),
    "packed values": lambda q, k, v: (q, k, v[0]),
}


@pytest.mark.parametrize("mask", [None, "padding", "dense", "bias"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", OTHER_STATES)
def test_states_that_do_not_fit_are_refused(
    name: str, causal: bool, queries: int, mask: str | None, backend: str
) -> None:
    """torch's operator reads as many values as there are keys, also behind the end of a tensor."""
    module, tensors = Module().eval(), OTHER_STATES[name](*states(queries, 3))
    module.is_causal, given, further = causal, None, {}
    if mask == "padding":
        given = torch.tensor([[0, 1, 1]]).expand(len(tensors[0]), -1)
    elif mask == "dense":
        given = torch.ones(1, 1, queries, 3, dtype=torch.bool)
    elif mask == "bias":
        further["position_bias"] = torch.ones(1, 2, queries, 3)
    with (
        torch.no_grad(),
        pytest.raises(ContractError, match=r"Module.7: .*value \[B, Hkv, S, Dv\]"),
    ):
        attnlib_attention(module, *tensors, given, **further)


def test_sinks_per_token_are_refused() -> None:
    """Sinks that are computed from the hidden states, `[B, Hq, T, 1]`."""
    with pytest.raises(UnsupportedConfigError, match=r"Module.7: the sinks have.*\(1, 2, 3, 1\)"):
        attnlib_attention(Module(), *states(), sinks=torch.zeros(1, 2, 3, 1))


def test_a_padding_mask_of_another_batch_is_refused() -> None:
    ids, mask = torch.tensor(prompts(7, 7, 7)), torch.ones(2, 7, dtype=torch.long)
    with pytest.raises(ContractError, match=r"attention_mask has shape \(2, 7\).*\[3, tokens\]"):
        run(decoder("llama"), "attnlib", lambda m: m(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("how", ["export", "trace"])
def test_export_and_tracing_are_refused(how: str) -> None:
    """The message names the cause, instead of an error about tensors without data."""
    model, ids = decoder("llama").requires_grad_(False), torch.tensor(prompts(6, 6))
    model.set_attn_implementation("attnlib")
    with pytest.raises(UnsupportedConfigError, match="export the model with attn_impl.*'eager'"):
        if how == "export":
            torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        else:
            torch.jit.trace(lambda tokens: model(tokens, use_cache=False).logits, ids)


def test_a_strict_export_names_the_reason() -> None:
    """Dynamo does not trace the exception; it showed how it failed to."""
    model, ids = decoder("llama"), torch.tensor(prompts(4))
    model.set_attn_implementation("attnlib")
    with pytest.raises(Exception, match="reason: attnlib plans each batch on the host.*'eager'"):
        torch.export.export(model, (ids,), {"use_cache": False}, strict=True)
