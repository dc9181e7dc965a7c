"""Decode steps on a GPU read no value of the padding mask; found on a CPU by following the mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from attnlib.integrations.transformers import attention, decode_on_device, devices, plain
from tests.integrations.tiny_models import (
    bart,
    decoder,
    deepseek_v3,
    llama4,
    padded,
    prompts,
    run,
    t5,
)
from tests.integrations.transformers.host_reads import HostReads

MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: decoder(name) for name in ("llama", "mistral", "gemma2", "gpt_oss")},
    "llama4": lambda: llama4(attn_temperature_tuning=False),
    "deepseek_v3": deepseek_v3,
    "bart": bart,
    "t5": t5,
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a GPU, with interpreted kernels; no validation, which reads values."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> HostReads:
    """Records reads, except those of interpreted kernels."""
    found = HostReads()

    def interpreted(run: Callable[..., Any], *args: Any) -> Any:
        with found.paused():
            return run(*args)

    seams = (plain, "run_layer"), (decode_on_device, "run_layer"), (attention, "attend_again")
    for module, name in seams:
        monkeypatch.setattr(module, name, partial(interpreted, getattr(module, name)))
    return found


@torch.no_grad()
def decode_logits(model: Any, implementation: str, reads: HostReads | None = None) -> torch.Tensor:
    """Logits of two decode steps after an eager prefill of a padded batch, `[2, B, vocabulary]`."""
    model.set_attn_implementation("eager")
    batch = padded(prompts(6, 2, 4), "left")
    mask, tokens = batch["attention_mask"], torch.tensor([[5], [6], [7]])
    decoder_only = not model.config.is_encoder_decoder
    prompt = batch if decoder_only else {**batch, "decoder_input_ids": tokens}
    out = model(**prompt, use_cache=True)
    model.set_attn_implementation(implementation)
    found = []
    for _ in range(2):
        if decoder_only:
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
            step = {"input_ids": tokens}
        else:
            states = (out.encoder_last_hidden_state,)
            step = {"encoder_outputs": states, "decoder_input_ids": tokens}
        step |= {"attention_mask": mask, "past_key_values": out.past_key_values}
        if reads is None:
            out = model(**step, use_cache=True)
        else:
            reads.follow(mask)
            with reads:
                out = model(**step, use_cache=True)
        found.append(out.logits[:, -1])
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_decode_steps_do_not_read_the_mask(
    name: str, reads: HostReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, chunks, soft caps, sinks, cross-attention over a padded encoder, a position bias."""
    if name == "t5":  # a required triton backend is refused, as only torch adds a position bias
        monkeypatch.delenv("ATTNLIB_BACKEND")
    model = MODELS[name]()
    expected = decode_logits(model, "eager")
    found = decode_logits(model, "attnlib", reads)
    assert reads.reads == []
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_host_reads_are_found(reads: HostReads, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, where a read costs nothing."""
    monkeypatch.setattr(devices, "kind_of", lambda device: "cpu")
    decode_logits(decoder("llama"), "attnlib", reads)
    assert set(reads.reads) == {"cpu", "numpy"}


def test_interleaved_generations_have_their_own_keys() -> None:
    """Two caches of equal shape and other padding take turns: a batch that outlives a step is
    filled again."""
    model = decoder("llama")
    batches = [padded(prompts(6, 4), "left"), padded(prompts(3, 6, seed=1), "left")]

    @torch.no_grad()
    def call(model: Any) -> torch.Tensor:
        masks = [batch["attention_mask"] for batch in batches]
        caches = [model(**batch, use_cache=True).past_key_values for batch in batches]
        found = []
        for step in range(4):
            for which in (0, 1):
                masks[which] = torch.cat([masks[which], torch.ones(2, 1, dtype=torch.long)], 1)
                out = model(
                    torch.full((2, 1), 5 + step),
                    attention_mask=masks[which],
                    past_key_values=caches[which],
                    use_cache=True,
                )
                found.append(out.logits)
        return torch.cat(found)

    expected = run(model, "eager", call)
    torch.testing.assert_close(run(model, "attnlib", call), expected, atol=1e-4, rtol=1e-4)
