"""Outputs compared with plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.backends.flashinfer.impl import FlashInferImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from tests.backends import fake_flashinfer as fakes
from tests.backends.flashinfer.adapter import builder_for, run, spec_of
from tests.backends.steps import make_step

BATCHES = {
    "prefill": ([7, 33], [7, 33]),
    "chunk": ([5, 9], [40, 25]),
    "decode": ([1, 1, 1], [40, 1, 17]),
    "mixed": ([1, 1, 12], [40, 3, 30]),
    "decode behind": ([1, 12, 1], [40, 30, 3]),
    "zero rows": ([1, 0, 1], [5, 9, 12]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("release", fakes.RELEASES)
def test_matches_torch(monkeypatch: pytest.MonkeyPatch, batch: str, release: str) -> None:
    """M1 to M7, L1: output, natural LSE, padding rows; the signatures of both releases."""
    record = fakes.Recorder()
    fakes.install(monkeypatch, record, release)
    step = make_step(spec_of(), *BATCHES[batch])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built, padding=3, scale=0.3)
    expected, expected_lse = step.expected(scale=0.3)
    tokens = step.common.num_actual_tokens
    torch.testing.assert_close(out[:tokens], expected)
    torch.testing.assert_close(lse[:tokens], expected_lse)
    assert (out[tokens:] == 0).all() and torch.isneginf(lse[tokens:]).all()
    kinds = [call["kind"] for call in record.runs]
    assert ("decode" in kinds) == (step.common.query_lens_cpu[0].item() == 1)


def test_rows_without_keys(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """N2: their LSE is -inf, not FlashInfer's -5e4; fa3, which is wrong for them, is not used."""
    step = make_step(spec_of(), [1, 1, 4, 3], [9, 1, 30, 3])
    for lengths in (step.common.seq_lens, step.common.seq_lens_cpu):
        lengths[1] = lengths[3] = 0
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built)
    expected, expected_lse = step.expected()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()
    assert [call["kind"] for call in record.runs] == ["decode", "fa2"]


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_a_very_small_lse_is_no_empty_row(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, mask: str
) -> None:
    """L1: which rows see no key follows from the lengths: a base-2 LSE of -66854 is a true one, and
    rows before the first key have none."""
    step = make_step(spec_of(mask_kind=mask), [1, 1, 4, 3], [9, 1, 30, 3])
    for lengths in (step.common.seq_lens, step.common.seq_lens_cpu):
        lengths[1], lengths[3] = 0, 2
    step.query.fill_(-24.0)
    step.cache.key_cache.fill_(30.17)
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built, scale=1.0)
    expected, expected_lse = step.expected(scale=1.0)
    assert (expected_lse[0] < -45_000 * math.log(2)).all()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse)
    empty = [1, 6] if mask == "causal" else [1]
    assert torch.isneginf(lse).all(1).nonzero().flatten().tolist() == empty


def test_window_soft_cap_and_sinks(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """F1, W1, M4: all three in one layer, decode and prefill."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.3])
    step = make_step(
        spec_of(sliding_window=5, logits_soft_cap=2.0, has_sink=True), [1, 9], [30, 20]
    )
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    assert {plan["window_left"] for plan in record.plans} == {4}
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales_of_a_quantized_cache(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, as_tensor: bool
) -> None:
    """M9: floats are passed to the kernel, tensors are applied without a synchronization."""
    step = make_step(spec_of(kv_cache_dtype="fp8"), [1, 9], [30, 20])
    k_scale, v_scale = 0.5, 0.25
    step.cache.k_scale = torch.tensor(k_scale) if as_tensor else k_scale
    step.cache.v_scale = torch.tensor(v_scale) if as_tensor else v_scale
    out, lse = run(monkeypatch, step, builder_for(monkeypatch, step.spec).build(0, step.common))
    expected, expected_lse = step.expected()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_scale_of_nan_reaches_rows_that_see_keys(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, side: str
) -> None:
    """M5, M9: rows without keys stay zero, their LSE stays -inf."""
    step = make_step(spec_of(kv_cache_dtype="fp8"), [1, 1, 4, 3], [9, 1, 30, 3])
    for lengths in (step.common.seq_lens, step.common.seq_lens_cpu):
        lengths[1], lengths[3] = 0, 2
    for name in ("k_scale", "v_scale"):
        setattr(step.cache, name, torch.tensor(math.nan if name[0] == side else 0.5))
    out, lse = run(monkeypatch, step, builder_for(monkeypatch, step.spec).build(0, step.common))
    empty = torch.zeros(len(out), dtype=torch.bool)
    empty[[1, 6]] = True
    assert (out[empty] == 0).all() and out[~empty].isnan().all()
    assert torch.isneginf(lse[empty]).all()
    assert (lse[~empty].isnan() == (side == "k")).all()


def test_strided_output(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """P9: FlashInfer's fa2 kernels ignore the strides of the output."""
    step = make_step(spec_of(), [1, 4], [30, 20])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    buffer = torch.full((5, 5, 72), 7.0, dtype=torch.bfloat16)
    FlashInferImpl(step.spec).forward(step.query, step.cache, built, buffer[:, :4, :64], None)
    torch.testing.assert_close(buffer[:, :4, :64], step.expected()[0])
    assert (buffer[:, 4] == 7).all() and (buffer[..., 64:] == 7).all()


def test_no_launch_without_work(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """N2: no requests, no tokens."""
    for queries, sequences in (([], []), ([0, 0], [4, 0])):
        step = make_step(spec_of(), queries, sequences)
        out, lse = run(monkeypatch, step, builder_for(monkeypatch, step.spec).build(0, step.common))
        assert (out == 0).all() and torch.isneginf(lse).all()
    assert record.runs == [] and record.plans == []


def test_different_strides_of_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """P1: FlashInfer has one set of strides for keys and values."""
    step = make_step(spec_of(), [1], [4])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    wide = torch.zeros(step.cache.num_blocks, 16, 2, 128, dtype=torch.bfloat16)
    step.cache = PagedKVCache.from_views(step.cache.key_cache, wide[..., :64])
    with pytest.raises(ContractError, match="keys of layer model.0 have strides"):
        run(monkeypatch, step, built, prefix="model.0")
