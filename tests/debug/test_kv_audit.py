"""Errors of KV formats in recorded calls."""

from __future__ import annotations

import pytest
import torch

from attnlib.debug.kv_audit import AUDIT_FORMATS, AuditFormat, KVAudit, audit_call
from attnlib.errors import ContractError
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import paged_attention
from attnlib.testing.page_formats import PAGE_NAMES, dequantize_tokens, quantize_tokens
from tests.debug.recorded_calls import captured

CASE = Case(batch="mixed", num_heads=4, num_kv_heads=2, head_size=32, sliding_window=20, sinks=True)


def _oracle(step: MaterializedCase, name: str) -> torch.Tensor:
    """The output over keys and values that the integer reference has quantized."""
    inputs = step.inputs
    views = []
    for view in (inputs.cache.key, inputs.cache.value):
        finite = view.nan_to_num(0.0).reshape(-1, 2, 32)
        views.append(dequantize_tokens(*quantize_tokens(finite, name)).view(view.shape))
    return paged_attention(
        inputs.query, *views, inputs.block_table, inputs.query_start_loc, inputs.seq_lens,
        step.params,
    ).out  # fmt: skip


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_errors_are_those_of_the_integer_reference(name: str) -> None:
    step = captured(CASE)
    found = audit_call(step, [AuditFormat(name, name)])[name]
    exact = step.oracle().out
    error = _oracle(step, name) - exact
    assert found.max_error == pytest.approx(float(error.abs().max()), rel=1e-3)
    expected = float(error.square().sum() / exact.square().sum()) ** 0.5
    assert found.output_error == pytest.approx(expected, rel=1e-3)
    assert found.mean_lse_error > 0 and found.saturation == 0.0
    assert found.bytes_per_token == step.spec.replace(kv_cache_dtype=name).kv_bytes_per_token


def test_formats_rank_as_their_precision() -> None:
    """8-bit integers before 8-bit floats before 4 bits; a scale per token before e5m2."""
    found = audit_call(captured(CASE))
    assert set(found) == {one.label for one in AUDIT_FORMATS}
    errors = {label: one.output_error for label, one in found.items()}
    assert (
        errors["int8_per_token_head"] < errors["fp8_per_token_head"] < errors["fp8_e5m2, scale 1"]
    )
    assert errors["fp8_e4m3"] < errors["int4_per_group"]
    assert all(0 < error < 0.3 for error in errors.values())


def test_saturation_is_counted() -> None:
    """With scale 1, values above 448 are clipped; with a scale from the values, none."""
    step = captured(CASE)
    step.inputs.cache.value.mul_(300.0)
    found = audit_call(step)
    slots = {s for r, n in enumerate(step.inputs.batch.seq_lens)
             for s in step.inputs.placement.slots(r, 0, n, 16)}  # fmt: skip
    values = step.inputs.cache.value.reshape(-1, 2, 32)[sorted(slots)]
    expected = float((values.abs() > 448 * (1 + 2**-10)).sum()) / (2 * values.numel())
    assert found["fp8_e4m3, scale 1"].saturation == pytest.approx(expected) and expected > 0.02
    assert found["fp8_e4m3"].saturation == found["fp8_e4m3 per head"].saturation == 0.0
    assert found["fp8_e4m3, scale 1"].output_error > 3 * found["fp8_e4m3"].output_error


def test_layers_add_up() -> None:
    step, audit = captured(CASE), KVAudit()
    label = "int4_per_group"
    one = audit_call(step, [AuditFormat(label, label)])
    for layer in ("first", "second", "second"):
        audit.add(layer, one, step.spec)
    total = audit.total(label)
    assert total.output_error == pytest.approx(one[label].output_error)
    assert total.bytes_per_token == 2 * one[label].bytes_per_token
    assert audit.layers["second"][label].lse_count == 2 * one[label].lse_count
    saved = audit.to_dict()["first"][label]["memory_saved"]
    assert saved == pytest.approx(1 - (16 + 8) / (2 * 32)), "of 16 bits"
    assert audit.output_error(label) == pytest.approx(one[label].output_error)
    assert audit.totals()[label]["pooled_output_error"] == pytest.approx(total.output_error)


def test_what_cannot_be_audited() -> None:
    """A format that the layer cannot have is reported; a quantized recording is an error."""
    latent = Case(
        batch="q3s20", num_heads=2, num_kv_heads=1, head_size=64, head_size_v=32, use_mla=True,
        layout="ALIASED",
    )  # fmt: skip
    found = audit_call(captured(latent))
    assert "use_mla stores them once" in found["int8_per_token_head"].reason
    assert not found["fp8_e4m3"].reason and found["fp8_e4m3"].output_error > 0
    with pytest.raises(ContractError, match="record it with kv_cache_dtype='auto'"):
        audit_call(captured(Case(batch="q3s20", kv_cache_dtype="fp8_e4m3")))
    with pytest.raises(ContractError, match="does not hold the keys of its own step"):
        audit_call(captured(CASE, kv_written=False))


def test_latents_have_one_scale() -> None:
    """P10: the values are a prefix of the keys, so both have the computed scale of the keys."""
    latent = Case(
        batch="q9s40", num_heads=2, num_kv_heads=1, head_size=64, head_size_v=32, use_mla=True,
        layout="ALIASED",
    )  # fmt: skip
    step = captured(latent)
    step.inputs.cache.key[..., 32:] *= 4  # the largest elements are not in the values
    found = audit_call(step)
    assert not found["fp8_e5m2"].reason
    for label in ("fp8_e4m3", "fp8_e4m3 per head", "fp8_e4m3, fp8 queries"):
        assert 0 < found[label].output_error < 2 * found["fp8_e4m3, scale 1"].output_error
