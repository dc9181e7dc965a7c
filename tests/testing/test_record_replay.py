"""Record, replay, shrink: a call survives the journey through a file, and a failing one gets small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.debug.record import capture_call, load_recording, save_recording
from attnlib.debug.replay import replay, shrink
from attnlib.errors import ContractError
from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.runner import run_materialized_case
from attnlib.testing.tensor_io import (
    pack_cache_views,
    pack_tensor,
    unpack_cache_views,
    unpack_tensor,
)
from tests.testing.toy_backend import ToyBackend, ToyBuilder, toy_with
from tests.testing.wrong_backends import OffByOneWindow, SinkIgnoredInDecode

CASES = {
    "mixed": Case(batch="mixed", needs_lse=True),
    "window": Case(batch="ragged", sliding_window=5, layout="NHD_INTERLEAVED"),
    "sinks": Case(batch="decode", sinks=True, alibi=True, logits_soft_cap=2.0, layout="HND"),
    "fp8": Case(
        batch="mixed", kv_cache_dtype="fp8_e4m3", kv_scale_kind="head", k_scale=0.25, v_scale=0.5
    ),
    "padding": Case(batch="graph_padding", layout="NHD_PACKED", mask="per_request"),
    "bfloat16": Case(batch="chunked", dtype="bfloat16"),
}


def _captured(case: Case, *, kv_written: bool = True) -> MaterializedCase:
    step = case.materialize(kv_written=kv_written)
    metadata = ToyBuilder(step.spec, "cpu").build(0, step.common())
    inputs = step.inputs
    return capture_call(
        step.spec,
        inputs.query,
        inputs.key,
        inputs.value,
        step.cache(),
        metadata,
        scale=step.params.scale,
        alibi_slopes=step.params.alibi_slopes,
        sinks=step.params.sinks,
        kv_written=kv_written,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_written", [True, False])
def test_a_recorded_call_replays_to_the_same_bits(
    name: str, kv_written: bool, tmp_path: Path
) -> None:
    """Live call, captured step and the file give one result, within the error budget."""
    live = run_materialized_case(ToyBackend, CASES[name].materialize(kv_written=kv_written)).out
    captured = _captured(CASES[name], kv_written=kv_written)
    loaded = load_recording(save_recording(captured, tmp_path / "deep" / "call.pt"))
    result = replay(loaded, ToyBackend)
    assert result.passed, str(result)
    assert result.output is not None
    assert torch.equal(result.output.out, live)
    assert loaded.spec == captured.spec


def test_only_touched_pages_are_kept_and_strides_survive(tmp_path: Path) -> None:
    case = Case(batch="q1s40_q3s20", placement="top", layout="HND_INTERLEAVED")
    source = case.materialize()
    captured = _captured(case)
    assert source.inputs.cache.key.shape[0] > 20
    assert captured.inputs.cache.key.shape[0] == 5
    loaded = load_recording(save_recording(captured, tmp_path / "call.pt"))
    for mine, original in (
        (loaded.inputs.cache.key, source.inputs.cache.key),
        (loaded.inputs.cache.value, source.inputs.cache.value),
        (loaded.inputs.query, source.inputs.query),
    ):
        assert mine.stride() == original.stride()
    key, value = loaded.inputs.cache.key, loaded.inputs.cache.value
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def test_replay_changes_nothing(tmp_path: Path) -> None:
    """Two replays of one recording agree, also when the backend writes."""
    captured = _captured(CASES["mixed"], kv_written=False)
    first, second = replay(captured, ToyBackend), replay(captured, ToyBackend)
    assert first.output is not None and second.output is not None
    assert torch.equal(first.output.out, second.output.out)


def test_a_wrong_backend_fails_the_replay_with_both_errors() -> None:
    result = replay(_captured(CASES["window"]), toy_with(OffByOneWindow))
    assert not result.passed
    assert "over budget: max error" in str(result)
    assert "sliding_window=5" in str(result)


def test_what_a_backend_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedCase, match="attention sinks: not supported"):
        replay(_captured(CASES["sinks"]), toy_with(sink=False))


def test_a_backend_that_raises_is_a_failed_replay() -> None:
    class Raises(OffByOneWindow):
        def left_keys(self, query_len: int) -> int | None:
            raise ZeroDivisionError("oops")

    assert (
        replay(_captured(CASES["window"]), toy_with(Raises)).message
        == "raised ZeroDivisionError: oops"
    )


def test_shrink_finds_the_one_request_that_matters() -> None:
    """Only decodes are wrong here; of eight requests one decode is left."""
    case = Case(batch="2q9s20_q1s33_q4_q7s11_2q2s40_q5", sinks=True)
    backend = toy_with(SinkIgnoredInDecode)
    smallest = shrink(_captured(case), lambda step: not replay(step, backend).passed)
    assert smallest.inputs.batch.num_reqs == 1
    assert smallest.inputs.batch.query_lens == (1,)
    assert not replay(smallest, backend).passed


def test_shrink_cuts_queries_to_a_token(tmp_path: Path) -> None:
    case = Case(batch="q12s30_q9s40", sliding_window=4)
    backend = toy_with(OffByOneWindow)
    smallest = shrink(_captured(case), lambda step: not replay(step, backend).passed)
    assert smallest.inputs.batch.query_lens == (1,)
    again = load_recording(save_recording(smallest, tmp_path / "small.pt"))
    assert not replay(again, backend).passed
    assert replay(again, ToyBackend).passed


def test_shrink_leaves_what_does_not_fail() -> None:
    step = _captured(CASES["mixed"])
    assert shrink(step, lambda part: not replay(part, ToyBackend).passed) is step


def test_parts_of_a_batch_compute_what_the_batch_computes() -> None:
    """The law that shrinking rests on."""
    step = Case(batch="q9s20_q1s33_q4", mask="per_request").materialize()
    whole = run_materialized_case(ToyBackend, step).out.clone()
    part = run_materialized_case(ToyBackend, slice_batch(step, [2, 0], [(1, 4), (3, 9)])).out
    torch.testing.assert_close(part, torch.cat([whole[11:14], whole[3:9]]), rtol=0, atol=1e-7)


def test_metadata_without_lengths_is_refused_by_name() -> None:
    step = CASES["mixed"].materialize()
    with pytest.raises(
        ContractError, match="object does not have query_start_loc, seq_lens and block_table"
    ):
        capture_call(step.spec, step.inputs.query, None, None, step.cache(), object(), scale=1.0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"attnlib_recording": 99}, path)
    with pytest.raises(
        ContractError, match="is not an attnlib recording of version 2 \\(found 99\\)"
    ):
        load_recording(path)


def test_strides_survive_freezing() -> None:
    base = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    for view in (base, base.transpose(0, 1), base[:, ::2], base[1:, :, 1:3], base[:0]):
        again = unpack_tensor(pack_tensor(view), "cpu")
        assert again.stride() == view.stride()
        assert torch.equal(again, view)


def test_aliased_views_stay_aliased() -> None:
    """MLA: the value is a prefix of the key."""
    key = torch.randn(4, 2, 1, 8)
    cache = PagedKVCache.from_views(key, key[..., :6])
    thawed_key, thawed_value = unpack_cache_views(
        pack_cache_views(cache.key_cache, cache.value_cache, torch.tensor([3, 1])), "cpu"
    )
    assert torch.equal(thawed_key, key[[3, 1]])
    assert thawed_value.data_ptr() == thawed_key.data_ptr()
