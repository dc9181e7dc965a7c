"""Recordings keep the call, the used blocks and the strides of all tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.debug.kv_audit import audit_call
from attnlib.debug.record import capture_call, load_recording, record_calls, save_recording
from attnlib.debug.replay import replay
from attnlib.debug.shadow import shadow
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS
from attnlib.testing.case import Case
from attnlib.testing.page_formats import PAGE_NAMES
from attnlib.testing.runner import run_materialized_case
from tests.debug.recorded_calls import CASES, captured
from tests.testing.toy_backend import ToyBackend


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_written", [True, False])
def test_a_recorded_call_replays_to_the_same_bits(
    name: str, kv_written: bool, tmp_path: Path
) -> None:
    """The live call, the captured call and the file give one result, within the error budget."""
    live = run_materialized_case(ToyBackend, CASES[name].materialize(kv_written=kv_written)).out
    step = captured(CASES[name], kv_written=kv_written)
    loaded = load_recording(save_recording(step, tmp_path / "folder" / "call.pt"))
    result = replay(loaded, ToyBackend)
    assert result.passed, str(result)
    assert result.output is not None
    assert torch.equal(result.output.out, live)
    assert loaded.spec == step.spec


@pytest.mark.parametrize("name", PAGE_NAMES)
@pytest.mark.parametrize("kv_written", [True, False])
def test_pages_are_recorded_with_their_scales(name: str, kv_written: bool, tmp_path: Path) -> None:
    case = Case(batch="mixed", kv_cache_dtype=name, layout="HND_INTERLEAVED")
    live = run_materialized_case(TorchBackend, case.materialize(kv_written=kv_written)).out
    step = captured(case, kv_written=kv_written)
    loaded = load_recording(save_recording(step, tmp_path / "call.pt"))
    result = replay(loaded, "torch")
    assert result.passed and result.output is not None, str(result)
    assert torch.equal(result.output.out, live)
    assert loaded.spec == step.spec and loaded.case.kv_cache_dtype == name


def test_only_used_blocks_are_kept_and_strides_are_preserved(tmp_path: Path) -> None:
    case = Case(batch="q1s40_q3s20", placement="top", layout="HND_INTERLEAVED")
    source = case.materialize()
    step = captured(case)
    assert source.inputs.cache.key.shape[0] > 20
    assert step.inputs.cache.key.shape[0] == 5
    loaded = load_recording(save_recording(step, tmp_path / "call.pt"))
    for restored, original in (
        (loaded.inputs.cache.key, source.inputs.cache.key),
        (loaded.inputs.cache.value, source.inputs.cache.value),
        (loaded.inputs.query, source.inputs.query),
    ):
        assert restored.stride() == original.stride()
    key, value = loaded.inputs.cache.key, loaded.inputs.cache.value
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def test_metadata_without_lengths_is_rejected() -> None:
    step, bare = CASES["mixed"].materialize(), attnlib.AttentionMetadata(slot_mapping=None)
    with pytest.raises(
        ContractError, match="AttentionMetadata does not have query_start_loc, seq_lens and"
    ):
        capture_call(step.spec, step.inputs.query, None, None, step.cache(), bare, scale=1.0)


def test_a_score_function_is_recorded_by_name_and_with_its_tensors(tmp_path: Path) -> None:
    """Bounds, constants and tensors come back; other tensors give another oracle."""
    case = Case(batch="mixed", score="attnlib.score_functions.builtin:documents")
    step = captured(case)
    path = save_recording(step, tmp_path / "call.pt")
    loaded = load_recording(path)
    assert loaded.spec.score_function == step.spec.score_function
    assert set(loaded.given_score_tensors or {}) == {"document_begin"}
    assert torch.equal(loaded.oracle().out, step.oracle().out)

    data = torch.load(path, weights_only=True)
    data["score_tensors"]["document_begin"].zero_()
    torch.save(data, path)
    assert not torch.equal(load_recording(path).oracle().out, step.oracle().out)


def test_bounds_of_one_head_are_recorded(tmp_path: Path) -> None:
    """A recording made before they existed has no such field."""
    step = captured(Case(batch="mixed", score="attnlib.score_functions.builtin:head_windows"))
    path = save_recording(step, tmp_path / "call.pt")
    assert load_recording(path).spec.score_function == step.spec.score_function
    data = torch.load(path, weights_only=True)
    del data["spec"]["score_function"]["head_bounds"]
    torch.save(data, path)
    function = load_recording(path).spec.score_function
    assert function is not None and function.head_bounds is None and function.bounds is not None


def test_a_score_function_in_main_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    function = CASES["score"].spec.score_function
    assert function is not None
    monkeypatch.setattr(function.function, "__module__", "__main__")
    with pytest.raises(ContractError, match="function is defined in __main__, which a replay"):
        captured(CASES["score"])


def test_a_score_function_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    path = save_recording(captured(CASES["score"]), tmp_path / "call.pt")
    data = torch.load(path, weights_only=True)
    data["spec"]["score_function"]["function"] = "missing_module:bias"
    torch.save(data, path)
    with pytest.raises(ContractError, match="missing_module:bias cannot be imported .* PYTHONPATH"):
        load_recording(path)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"attnlib_recording": 99}, path)
    with pytest.raises(
        ContractError, match="is not an attnlib recording of version 2 \\(found 99\\)"
    ):
        load_recording(path)


def test_a_block_records_the_calls_of_each_layer(tmp_path: Path) -> None:
    """`record_calls` writes every second call of two layers, with scale and sinks; calls after the
    block are not recorded."""
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, has_sink=True
    )
    layers = [
        attnlib.Attention(
            spec, backend="torch", scale=0.5, sinks=torch.randn(4), prefix=prefix, device="cpu"
        )
        for prefix in ("model/layers.0", "")
    ]
    caches = [attnlib.PagedKVCache.allocate(spec, num_blocks=4, device="cpu") for _ in layers]
    builder = layers[0].backend.make_builder(spec, "cpu")
    batch = attnlib.CommonAttentionMetadata.from_lengths([1, 7], [9, 30], [[3], [1, 2]], 16, "cpu")
    metadata = builder.build(0, batch)

    def step() -> list[torch.Tensor]:
        q, k, v = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
        return [
            layer(q, k, v, cache, metadata) for layer, cache in zip(layers, caches, strict=True)
        ]

    with record_calls(tmp_path / "calls", every=2) as files:
        outputs = [step() for _ in range(3)]
    step()
    assert not OBSERVERS
    assert [path.name for path in files] == [
        "model_layers.0-0.pt", "layer1-0.pt", "model_layers.0-2.pt", "layer1-2.pt"
    ]  # fmt: skip
    assert sorted(files) == sorted((tmp_path / "calls").iterdir())
    for path, live in zip(files, [*outputs[0], *outputs[2]], strict=True):
        recorded = load_recording(path)
        assert recorded.params.scale == 0.5 and recorded.inputs.kv_written
        result = replay(recorded, "torch")
        assert result.passed and result.output is not None, str(result)
        torch.testing.assert_close(result.output.out, live)
        errors = audit_call(recorded)["int8_per_token_head"]
        assert 0 < errors.output_error < 0.02
    with (
        pytest.raises(ContractError, match="every=0 must be at least 1"),
        record_calls("", every=0),
    ):
        pass


def test_layers_of_one_prefix_and_earlier_files_are_not_overwritten(tmp_path: Path) -> None:
    """Two models in one process, a second run, and names that become one file name."""
    spec = attnlib.AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32)
    batch = attnlib.CommonAttentionMetadata.from_lengths([1], [9], [[3]], 16, "cpu")
    layers = [
        attnlib.Attention(spec, backend="torch", scale=scale, prefix=prefix, device="cpu")
        for scale, prefix in ((0.5, "a/b"), (0.25, "a/b"), (0.125, "a_b"), (1.0, ""), (2.0, ""))
    ]
    cache = attnlib.PagedKVCache.allocate(spec, num_blocks=4, device="cpu")
    metadata = layers[0].backend.make_builder(spec, "cpu").build(0, batch)
    found = []
    for _ in range(2):
        with record_calls(tmp_path) as files:
            for layer in layers:
                layer(torch.randn(1, 4, 16), None, None, cache, metadata)
        found += files
    assert len(set(found)) == len(list(tmp_path.iterdir())) == 10
    scales = [load_recording(path).params.scale for path in found]
    assert scales == [0.5, 0.25, 0.125, 1.0, 2.0] * 2


@pytest.mark.parametrize("damage", ["folder", "text", "cut", "another key", "a missing key"])
def test_a_damaged_recording_is_refused(damage: str, tmp_path: Path) -> None:
    """D5: one error with the path, whatever is wrong with the file."""
    path = save_recording(Case(batch="q3s9").materialize(), tmp_path / "call.pt")
    content = torch.load(path, weights_only=True)
    if damage == "folder":
        path = tmp_path
    elif damage == "text":
        path.write_text("no recording")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:900])
    elif damage == "another key":
        torch.save({**content, "batch": 7}, path)
    else:
        torch.save({key: value for key, value in content.items() if key != "query"}, path)
    with pytest.raises(ContractError, match=f"{path}.*(recording|is not a file)") as raised:
        load_recording(path)
    assert "weights_only" not in str(raised.value), "advice to run what is in the file"


def test_a_full_disk_is_named_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reports it as a RuntimeError of its writer, and leaves half a file."""
    step = captured(CASES["mixed"], kv_written=True)

    def full(data: object, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        ContractError, match="a.pt cannot be written .*unexpected pos.*enough space"
    ):
        save_recording(step, tmp_path / "new" / "a.pt")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("earlier")
    with pytest.raises(ContractError, match="file cannot be written"):
        save_recording(step, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]
    with pytest.raises(ContractError, match="new cannot be written .*not a file"):
        save_recording(step, tmp_path / "new")
    with pytest.raises(ContractError, match="b.pt cannot be written"):
        save_recording(step, tmp_path / "file" / "b.pt")


def test_a_folder_that_cannot_be_made_is_refused_before_the_block(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", 3):
        with pytest.raises(ContractError, match="cannot be created"), record_calls(folder):
            pytest.fail("the block ran")
    with pytest.raises(ContractError, match="every=0 must be at least 1"):
        with record_calls(tmp_path, every=0):
            pytest.fail("the block ran")


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, "per request"])
def test_a_batch_with_a_mask_of_its_own_is_replayed_with_it(
    causal: bool | str, window: int | None, tmp_path: Path
) -> None:
    """Drafts in blocks are bidirectional on a causal layer, whose window ends at the query (M2)."""
    spec = attnlib.AttentionSpec(
        num_heads=2, head_size=16, dtype=torch.float32, block_size=4, sliding_window=window
    )
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    mask = torch.tensor([True, False]) if causal == "per request" else False
    batch = attnlib.CommonAttentionMetadata.from_lengths(
        [4, 3], [9, 7], [[0, 1, 2], [3, 4]], 4, "cpu", causal=mask
    )
    metadata = layer.backend.make_builder(spec, "cpu").build(0, batch)
    cache = attnlib.PagedKVCache.allocate(spec, 5, device="cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    q, k, v = torch.randn(3, 7, 2, 16)
    with record_calls(tmp_path) as files, shadow("torch") as log:
        out = layer(q, k, v, cache, metadata)
    result = replay(load_recording(files[0]), "torch")
    assert result.passed, result.message
    assert result.output is not None
    torch.testing.assert_close(result.output.out, out.view(7, 2, 16))
    assert log.records[0].out_error == 0.0


@pytest.mark.parametrize("batch", ["q0_pad2", "q0s0_q0s0", "q0_pad1"])
@pytest.mark.parametrize("changes", [{}, {"use_mla": True}, {"kv_cache_dtype": "fp8_e4m3"}])
def test_a_batch_without_tokens_has_one_block(
    batch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """M7: no cache of a layer is empty, and backends need not take one that is."""
    sizes = (
        {"num_kv_heads": 1, "head_size_v": 8, "layout": "ALIASED"} if "use_mla" in changes else {}
    )
    step = captured(Case(batch=batch, needs_lse=True, **changes, **sizes), kv_written=False)
    loaded = load_recording(save_recording(step, tmp_path / "call.pt"))
    for recorded in (step, loaded):
        assert recorded.inputs.cache.key.shape[0] == 1
        for backend in ("torch", "triton"):
            result = replay(recorded, backend)
            assert result.passed, str(result)
