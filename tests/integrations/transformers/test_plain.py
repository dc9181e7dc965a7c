"""Plain forwards: which masks kernels apply, and which are evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from attnlib.errors import ContractError
from attnlib.integrations.transformers import plain
from attnlib.integrations.transformers.attention import attnlib_attention
from tests.integrations.tiny_models import decoder, difference, padded, prompts, run
from tests.integrations.transformers.module_calls import Module, states
from tests.integrations.transformers.test_traced import CACHE


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the layers were computed, in order: "paged", "unpaged" or "dense"."""
    paths: list[str] = []
    for name in ("paged", "unpaged", "dense"):
        attend = getattr(plain, f"{'' if name == 'dense' else '_'}attend_{name}")

        def recording(*args: Any, name: str = name, attend: Any = attend) -> torch.Tensor:
            paths.append(name)
            return attend(*args)

        monkeypatch.setattr(plain, attend.__name__, recording)
    return paths


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_do_not_see_each_other(name: str, backend: str, routes: list[str]) -> None:
    """Several sequences in one row, described by position_ids alone."""
    ids, positions = torch.tensor(prompts(9)), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    model = decoder(name)
    call = lambda m: m(ids, position_ids=positions, use_cache=False).logits  # noqa: E731
    assert difference(model, call) < 2e-5
    assert set(routes) == {"unpaged"}
    whole = run(model, "attnlib", lambda m: m(ids, use_cache=False).logits)
    assert float((run(model, "attnlib", call) - whole).abs().max()) > 1e-2


def test_packed_sequences_by_cu_seq_lens(routes: list[str]) -> None:
    """`cu_seq_lens_q` of the caller is equivalent to position_ids, also with a cache."""
    ids, positions = torch.tensor(prompts(9)), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    starts, model = torch.tensor([0, 4, 6, 9], dtype=torch.int32), decoder("mistral")
    expected = run(model, "eager", lambda m: m(ids, position_ids=positions, use_cache=False).logits)
    found = run(
        model, "attnlib", lambda m: m(ids, position_ids=positions, cu_seq_lens_q=starts).logits
    )
    assert float((found - expected).abs().max()) < 2e-5
    assert set(routes) == {"unpaged"}
    with pytest.raises(
        ContractError, match=r"cu_seq_lens_q=\[0, 4, 6, 8\].*increase from 0 to the length"
    ):
        run(
            model,
            "attnlib",
            lambda m: m(ids, position_ids=positions, cu_seq_lens_q=starts.clamp(max=8)),
        )


def test_bidirectional_spans(backend: str, routes: list[str]) -> None:
    """Image spans (Gemma 3 and others): a score function, and no evaluated mask."""
    model, ids = decoder("llama"), torch.tensor(prompts(7, 7))
    spans = torch.tensor([[-1, 0, 0, 0, -1, -1, -1], [-1, -1, -1, -1, 1, 1, -1]])
    inputs = model.get_input_embeddings()(ids)

    def in_spans(m: Any) -> torch.Tensor:
        mask = masking_utils.create_causal_mask(
            m.config, inputs, None, None, block_sequence_ids=spans
        )
        return m(ids, attention_mask=mask, use_cache=False).logits

    assert difference(model, in_spans) < 2e-5
    assert set(routes) == {"paged"}
    assert (
        float(
            (run(model, "attnlib", in_spans) - run(model, "attnlib", lambda m: m(ids).logits))
            .abs()
            .max()
        )
        > 1e-2
    )


def test_padding_between_tokens(backend: str, routes: list[str]) -> None:
    """Padding queries between tokens: the mask is evaluated, with and without a window."""
    batch = padded(prompts(8, 8), "left")
    batch["attention_mask"][0, 3:5] = 0
    for name, expected in (("llama", "dense"), ("mistral", "dense")):
        assert (
            difference(decoder(name), lambda m: m(**batch).logits, batch["attention_mask"]) < 2e-5
        )
        assert set(routes) == {expected}
        routes.clear()


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


def test_a_bidirectional_module_without_a_mask_has_no_window() -> None:
    """As in eager and sdpa attention; Diffusion Gemma passes a window and depends on it."""
    query, key, value = states(queries=3, keys=9)
    module = Module()
    for causal, window in ((False, None), (True, 4)):
        expected = dense(query, key, value, causal=causal, window=window)
        found, _ = attnlib_attention(
            module, query, key, value, None, sliding_window=4, is_causal=causal
        )
        torch.testing.assert_close(found, expected)


def test_keys_and_values_in_the_same_memory() -> None:
    """DeepSeek-V4 attends over one tensor as keys and values. Plain attention writes to neither."""
    query, key, _ = states()
    found, _ = attnlib_attention(Module(), query, key, key)
    torch.testing.assert_close(found, dense(query, key, key, causal=True, window=None))


@pytest.mark.parametrize("mask", [None, "square", "4D"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_elements_that_are_not_adjacent(
    position: int, queries: int, mask: str | None, backend: str
) -> None:
    """Such as the heads of channels of Florence 2: no kernel reads them, and torch's fused operator
    would read other memory."""
    keys = queries if mask == "square" else 5
    tensors = list(states(queries, keys))
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    visible[..., 1:2] = False  # no kernel argument expresses it
    given = visible if mask else None
    wanted = dense(*tensors, causal=True, window=None)
    if mask:
        wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, visible).transpose(1, 2)
    tensors[position] = tensors[position].transpose(2, 3).contiguous().transpose(2, 3)
    assert tensors[position].stride(3) > 1 or tensors[position].shape[2] == 1
    found, _ = attnlib_attention(Module().eval(), *tensors, given)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_cache_of_another_dtype_is_refused(tokens: int, backend: str) -> None:
    """A model that is converted after its cache was filled."""
    model, ids = decoder("llama"), torch.tensor(prompts(6))
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        caches = model(ids, use_cache=True).past_key_values
        for _ in range(3):
            model(ids[:, :1], **{CACHE: caches})
        model.to(torch.bfloat16)
        with pytest.raises(
            ContractError, match="query is torch.bfloat16, the keys are torch.float32"
        ):
            model(ids[:, :tokens], **{CACHE: caches})


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, window: int | None
) -> torch.Tensor:
    """Attention of the last queries over all keys, `[1, T, H, D]`."""
    queries, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    visible = distance <= (0 if causal else keys)
    visible &= distance > -(window or keys + 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible)
    return out.transpose(1, 2)
