"""Batches that change after they are built, inside an importable vLLM; run by
`test_vllm_adapter.py` with interpreted Triton kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm_adapter import HEADS, SIZE, Layer, vllm_batch
from vllm_latent_adapter import Layer as LatentLayer
from vllm_masks import IMAGES, RANGES, plain

from attnlib.integrations.vllm import backend, warm
from attnlib.integrations.vllm.backend import AttnlibBackend
from attnlib.integrations.vllm.mla_backend import AttnlibMLABackend
from attnlib.workspace import BatchLimits

BOUND = 64
"""Keys of the longest request, as the host declares them."""


@pytest.fixture(autouse=True)
def _config() -> Any:
    with set_current_vllm_config(VllmConfig()):
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        yield


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(layer: Layer, starts: torch.Tensor, lengths: torch.Tensor, **fields: Any) -> Any:
    """A batch over the blocks of the first requests of the last step."""
    tokens, longest = int(starts[-1]), int((starts[1:] - starts[:-1]).max())
    return vllm_batch(
        starts, lengths, tokens, longest, BOUND, layer.table[: len(lengths)].clone(), None, **fields
    )


def attend(layer: Layer, query: torch.Tensor, metadata: Any) -> torch.Tensor:
    output = torch.zeros_like(query)
    layer.impl.forward(layer.layer, query, None, None, layer.kv_cache, metadata, output)
    return output


def filled(**arguments: Any) -> Layer:
    layer = Layer(**arguments)
    layer.step([10, 10, 10], [10, 10, 10])
    layer.step([20, 20, 20], [30, 30, 30])
    return layer


@pytest.mark.parametrize("window", [None, 11])
def test_decodes_follow_lengths_and_blocks_in_place(window: int | None) -> None:
    """What `update_draft_decode_metadata` relies on: the bits of a new build."""
    layer = filled(sliding_window=window)
    assert layer.builder.supports_draft_decode_metadata_update
    batch, query = batch_of(layer, ints(0, 1, 2), ints(20, 7)), torch.randn(2, HEADS, SIZE)
    metadata = layer.builder.build(0, batch)
    before = attend(layer, query, metadata)
    batch.seq_lens.copy_(ints(25, 30))
    batch.block_table_tensor.copy_(layer.table[:2].flip(0))
    layer.builder.update_draft_decode_metadata(metadata)
    changed = attend(layer, query, metadata)
    assert torch.equal(changed, attend(layer, query, layer.builder.build(0, batch)))
    assert not torch.equal(changed, before)


def test_lengths_of_decodes_on_the_host_may_be_bounds() -> None:
    """As with drafts and asynchronous scheduling. Those of prefills are exact."""
    layer = LatentLayer()
    layer.ahead = 5
    assert layer.impl._attention.backend.get_name() == "triton"
    for queries, lengths in (([20, 9], [20, 9]), ([1, 1], [21, 10]), ([1, 17], [22, 27])):
        query, output = layer.step(queries, lengths)
        expected = layer.expected(query, queries, lengths)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_batch_invariant_layers_give_a_request_its_bits_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, query = filled(), torch.randn(3, HEADS, SIZE)
    assert layer.impl.spec.batch_invariant
    together = layer.builder.build(0, batch_of(layer, ints(0, 1, 2, 3), ints(30, 23, 7)))
    alone = layer.builder.build(0, batch_of(layer, ints(0, 1), ints(30)))
    assert torch.equal(attend(layer, query, together)[:1], attend(layer, query[:1], alone))


@pytest.mark.parametrize("prefill", [False, True])
def test_query_lengths_may_differ_on_the_host(prefill: bool) -> None:
    """Adaptive verification: the device decides how many drafts of each request are verified."""
    layer, rest = filled(), [20] if prefill else []
    true, on_host = ints(0, *torch.tensor([1, 5, *rest]).cumsum(0)), [3, 3, *rest]
    lengths = ints(28, 30, *rest)
    batch = batch_of(layer, true, lengths)
    query = torch.randn(int(true[-1]), HEADS, SIZE)
    batch.max_query_len = max(*rest, 5) if prefill else 5
    expected = attend(layer, query, layer.builder.build(0, batch))
    batch.query_start_loc_cpu = ints(0, *torch.tensor(on_host).cumsum(0))
    assert torch.equal(attend(layer, query, layer.builder.build(0, batch)), expected)


def test_another_group_takes_the_metadata_with_its_own_blocks() -> None:
    layer = filled(**IMAGES)
    assert layer.builder.supports_update_block_table
    other, blocks = Layer(**IMAGES), layer.table[:2].flip(0)
    for starts, lengths, ranges in (
        (ints(0, 1, 2), ints(30, 23), None), (ints(0, 30, 42), ints(30, 22), RANGES)
    ):  # fmt: skip
        batch = batch_of(layer, starts, lengths, mm_req_doc_ranges=ranges)
        metadata = layer.builder.build(0, batch)
        updated = other.builder.update_block_table(metadata, blocks, torch.zeros(42).long())
        batch.block_table_tensor = blocks
        query = torch.randn(int(starts[-1]), HEADS, SIZE)
        expected = attend(layer, query, layer.builder.build(0, batch))
        other.kv_cache = layer.kv_cache
        assert torch.equal(attend(other, query, updated), expected)
    layer.table = blocks
    torch.testing.assert_close(expected, layer.expected(query, [30, 12], [30, 22], None, plain))


def test_groups_of_different_layers_build_their_own() -> None:
    """vLLM takes groups with equal caches for equal, but a soft cap is not part of the cache."""
    layer = Layer()
    layers = layer.config.compilation_config.static_forward_context
    layers["other"] = Layer(logits_soft_cap=5.0).layer
    builder = type(layer.builder)(layer.builder.kv_cache_spec, ["layer"], layer.config, "cpu")
    assert not builder.supports_update_block_table


def test_a_warm_up_inside_a_batch_leaves_its_metadata_alone() -> None:
    """On vLLM 0.26 the first call of a layer may have a batch."""
    layer, query = filled(), torch.randn(2, HEADS, SIZE)
    metadata = layer.builder.build(0, batch_of(layer, ints(0, 1, 2), ints(30, 23)))
    expected = attend(layer, query, metadata)
    built: list[Any] = []
    (own,) = layer.builder.builders.values()
    build, own.build = own.build, lambda *batch: built.append(batch) or build(*batch)
    layer.builder.limits = BatchLimits(max_num_reqs=2, max_num_tokens=4, max_seq_len=64)
    held, layer.impl.group_warmup.pending = layer.kv_cache.clone(), True
    assert torch.equal(attend(layer, query, metadata), expected)
    assert not built and not layer.impl.group_warmup.pending
    assert torch.equal(layer.kv_cache, held)
    warm._WARM.clear()  # the kernels of the layer are known now
    layer.impl.group_warmup.pending = True
    attend(layer, query, None)
    assert built and torch.equal(layer.kv_cache, held)


def test_subclasses_may_turn_hooks_off() -> None:
    """vLLM derives builders, of causal Whisper for example, that need a build per group."""
    layer = Layer()
    layers = layer.config.compilation_config.static_forward_context
    kind = type("Derived", (type(layer.builder),), {"supports_update_block_table": False})
    assert len(layers) == 1 and layer.builder.supports_update_block_table
    builder = kind(layer.builder.kv_cache_spec, ["layer"], layer.config, torch.device("cpu"))
    assert not builder.supports_update_block_table


def test_graphs_of_models_with_images_replay_decodes_of_any_length() -> None:
    layer = Layer(**IMAGES)
    assert layer.builder.get_varlen_cudagraph_max_query_len(layer.config, None) == 8


@pytest.mark.parametrize(("name", "answer"), [("triton", True), ("torch", False)])
def test_the_answer_follows_the_selected_backend(
    name: str, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLIB_BACKEND", name)
    assert AttnlibBackend.supports_device_cpu_query_lens_mismatch() is answer
    assert not AttnlibMLABackend.supports_device_cpu_query_lens_mismatch()
    assert Layer().builder.supports_draft_decode_metadata_update is answer
    assert not Layer(model={"rswa_window": 4}).builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize(
    ("size", "layers", "answer"), [(64, False, True), (33, False, False), (33, True, True)]
)
def test_the_answer_is_for_the_model_until_there_are_layers(
    size: int, layers: bool, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton kernels take head sizes that are multiples of 8."""
    config = Layer().config
    config.model_config = SimpleNamespace(dtype=torch.float32, get_head_size=lambda: size)
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    if not layers:
        config.compilation_config = SimpleNamespace(static_forward_context={})
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: config)
    assert AttnlibBackend.supports_device_cpu_query_lens_mismatch() is answer
