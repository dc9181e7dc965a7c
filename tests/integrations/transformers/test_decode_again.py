"""Decodes on a CPU: the layers after the first one call the operator, also in the next steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnlib
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers import decode, decode_again, plain
from attnlib.integrations.transformers.call_again import CallAgain
from attnlib.integrations.transformers.decode_spans import Spans, attend_spans
from attnlib.integrations.transformers.layers import Call
from attnlib.integrations.transformers.patterns import Pattern
from tests.integrations.tiny_models import bart, decoder, generated, padded, prompts, t5, umt5


def states(**changes: Any) -> tuple[torch.Tensor, ...]:
    sizes = {"batch": 2, "heads": 4, "keys": 9, "size": 8, "dtype": torch.float32} | changes
    generator = torch.Generator().manual_seed(0)
    shapes = (sizes["heads"], 1), (2, sizes["keys"]), (2, sizes["keys"])
    made = (
        torch.randn(sizes["batch"], *shape, sizes["size"], generator=generator) for shape in shapes
    )
    return tuple(tensor.to(sizes["dtype"]) for tensor in made)


def made(kwargs: dict[str, Any], starts: tuple[int, int] = (0, 0), key_bytes: int = 1) -> CallAgain:
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    call = Call(torch.nn.Identity(), *states(), 0.3, softcap, sinks, None, True)
    spans = Spans(list(starts), 9, key_bytes, torch.float32)
    return CallAgain.of(call, kwargs, Pattern(True), spans, attend_spans)


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    decode_again._local.last.clear()


@pytest.mark.parametrize("key_bytes", [1, 1 << 24], ids=["one call", "calls"])
@pytest.mark.parametrize("starts", [(0, 0), (3, 3), (0, 4), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "soft cap", "sinks"])
def test_values(kind: str, starts: tuple[int, int], key_bytes: int) -> None:
    """Rows that begin at different keys take one call with a bias, or a call each."""
    query, key, value = states()
    cap, sinks = 0.5, torch.randn(4, generator=torch.Generator().manual_seed(1))
    kwargs = {"soft cap": {"softcap": cap}, "sinks": {"s_aux": sinks}}.get(kind, {})
    found = made(kwargs, starts, key_bytes).attend(query, key, value, 0.3, kwargs)
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.mT * 0.3
    if kind == "soft cap":
        scores = cap * (scores / cap).tanh()
    hidden = torch.arange(9) < torch.tensor(starts)[:, None]
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    if kind == "sinks":
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, -1, -1, -1)], -1)
    expected = (scores.softmax(-1)[..., :9] @ value).transpose(1, 2)
    assert found is not None and float((found - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("start", [0, 2])
def test_the_bias_of_a_step_has_room_for_those_behind_it(start: int) -> None:
    """A token over padded rows makes a view of the bias, until its memory is full."""
    last = Spans([start, 7], start + 60, 1, torch.float32)
    assert last.bias is not None and last.is_small
    for end in (start + 61, start + 64):
        step, fresh = last.until(end), Spans([start, 7], end, 1, torch.float32)
        assert step is not None and step.bias is not None and fresh.bias is not None
        assert step.bias.data_ptr() == last.bias.data_ptr()
        assert torch.equal(step.bias, fresh.bias)
    assert last.until(start + 65) is None
    assert not Spans([0, 7], 1 << 18, 1, torch.float32).is_small


@pytest.mark.parametrize(
    "change",
    [
        {"keys": 10},
        {"batch": 1},
        {"size": 16},
        {"dtype": torch.bfloat16},
        {"scale": 0.4},
        {"kwargs": {"use_cache": True}},
        {"kwargs": {"position_bias": torch.zeros(1)}},
        {"kwargs": {"position_bias": None, "sinks": torch.zeros(4)}},
        {"kwargs": {"position_bias": None, "softcap": 30.0}},
        {"autocast": True},
        {"observer": True},
    ],
    ids=str,
)
def test_a_call_that_differs_takes_the_whole_way(change: dict[str, Any]) -> None:
    kwargs = change.get("kwargs", {"position_bias": None})
    sizes = {k: v for k, v in change.items() if k in ("keys", "batch", "size", "dtype")}
    again = made({"position_bias": None})
    if change.get("observer"):
        OBSERVERS.append(lambda *call: None)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=change.get("autocast", False)):
            assert again.attend(*states(**sizes), change.get("scale", 0.3), kwargs) is None
    finally:
        OBSERVERS.clear()
    assert again.attend(*states(), 0.3, {"position_bias": None}) is not None


@pytest.mark.parametrize("change", [{"s_aux": None}, {"s_aux": torch.zeros(3)}, {}], ids=str)
def test_sinks_must_be_given_as_before(change: dict[str, Any]) -> None:
    again = made({"s_aux": torch.zeros(4)})
    assert again.attend(*states(), 0.3, change) is None
    assert again.attend(*states(), 0.3, {"s_aux": torch.ones(4)}) is not None


@pytest.fixture
def whole_way(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of single queries whose plan was not known."""
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    calls: list[Any] = []
    attend = decode.attend_decode

    def counted(call: Any, step: Any, *others: Any) -> torch.Tensor | None:
        if step.q_length == 1:
            calls.append(step)
        return attend(call, step, *others)

    monkeypatch.setattr(plain, "attend_decode", counted)
    return calls


@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)], ids=["equal", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_only_the_first_decode_of_a_pattern_takes_the_whole_way(
    name: str, lengths: tuple[int, ...], whole_way: list[Any]
) -> None:
    """Models with two masks have one for each of their two layers."""
    model, batch = decoder(name), padded(prompts(*lengths), "left")
    expected = generated(model, "eager", batch, 10)
    assert torch.equal(generated(model, "attnlib", batch, 10), expected)
    assert len(whole_way) == (1 if name in ("llama", "mistral") else 2)
    static = generated(model, "attnlib", batch, 10, cache_implementation="static")
    assert torch.equal(static, expected)


@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)], ids=["equal", "padded"])
@pytest.mark.parametrize("make", [bart, t5, umt5])
def test_only_the_first_decode_of_an_encoder_decoder_takes_the_whole_way(
    make: Callable[[], Any], lengths: tuple[int, ...], whole_way: list[Any]
) -> None:
    """With a position bias that all layers share, or of each layer; one mask for the keys of the
    decoder, one for those of the encoder."""
    model, batch = make(), padded(prompts(*lengths), "right")
    expected = generated(model, "eager", batch, 10)
    assert torch.equal(generated(model, "attnlib", batch, 10), expected)
    assert len(whole_way) == 2
    static = generated(model, "attnlib", batch, 10, cache_implementation="static")
    assert torch.equal(static, expected)


@pytest.mark.parametrize("change", ["padding", "backend", "validation", "weights", "rows"])
@torch.no_grad()
def test_what_changes_between_two_steps_is_noticed(
    change: str, whole_way: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = decoder("llama"), padded(prompts(7, 7), "left")
    found = {}
    for name in ("eager", "attnlib"):
        model.set_attn_implementation(name)
        cache, mask = model(**batch, use_cache=True).past_key_values, batch["attention_mask"]
        logits, ids = [], torch.tensor([[5], [6]])
        for step in range(4):
            mask, options = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), {}
            if step == 2:
                whole_way.clear()
                if change == "padding":
                    mask[0, :3] = 0
                elif change == "rows":
                    cache.batch_select_indices(torch.tensor([1]))
                    mask, ids = mask[1:], ids[1:]
                elif change == "weights":
                    options["output_attentions"] = True
                elif change == "validation":
                    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
            backend = "triton" if change == "backend" and step == 2 else None
            with attnlib.use_backend(backend):
                out = model(ids, attention_mask=mask, past_key_values=cache, **options)
            logits.append(out.logits[-1])
        found[name] = torch.stack(logits)
    assert float((found["eager"] - found["attnlib"]).abs().max()) < 1e-4
    assert bool(whole_way) == (change != "padding")
