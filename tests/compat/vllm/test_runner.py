"""vLLM's v0 builder and state over backends of attnlib."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.compat import vllm
from attnlib.errors import ContractError


def runner(backend: Any = TorchBackend, size: int = 4) -> SimpleNamespace:
    model = SimpleNamespace(
        get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2,
        get_head_size=lambda: 32, dtype=torch.float32, is_encoder_decoder=False,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model, block_size=16, attn_backend=backend, device="cpu",
        max_batchsize_to_capture=size, max_seq_len_to_capture=64,
    )  # fmt: skip


def built(of: SimpleNamespace, seq_lens: list[int], query_lens: list[int]) -> Any:
    groups = [SimpleNamespace(block_tables={n: [2 * n, 2 * n + 1]}) for n in range(len(seq_lens))]
    builder = vllm.AttentionMetadataBuilder(SimpleNamespace(runner=of, inter_data_list=groups))
    builder.prepare()
    return builder.build(seq_lens, query_lens, -1, len(seq_lens))


@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend])
def test_the_state_takes_what_the_builder_builds(backend: Any) -> None:
    of = runner(backend)
    state = vllm.AttentionState[Any](of)
    model_input = SimpleNamespace(attn_metadata=built(of, [9, 20], [1, 1]), batch_size=4)
    assert state.begin_forward(model_input) is None
    metadata, buffers = model_input.attn_metadata, state.get_graph_input_buffers(None)
    assert metadata.seq_lens.tolist() == [9, 20, 0, 0]
    assert metadata.seq_lens.data_ptr() == buffers["seq_lens_tensor"].data_ptr()
    assert buffers["slot_mapping"][:4].tolist() == [8, 51, -1, -1]
    assert buffers["block_tables"][:2, :2].tolist() == [[0, 1], [2, 3]]


def test_a_batch_that_no_graph_holds_keeps_its_metadata() -> None:
    of = runner(size=1)
    state = vllm.AttentionState(of)
    for lengths in (([5], [5]), ([9, 20], [1, 1]), ([65], [1])):
        metadata = built(of, *lengths) if max(lengths[0]) < 33 else built(runner(), [32], [2])
        model_input = SimpleNamespace(attn_metadata=metadata)
        state.begin_forward(model_input)
        assert model_input.attn_metadata is metadata
    model_input = SimpleNamespace(attn_metadata=built(of, [5], [5]), batch_size=1)
    with pytest.raises(ContractError, match="do not fit a graph"):
        state.begin_forward(model_input)


def test_a_common_batch_must_fit_a_graph() -> None:
    common = attnlib.CommonAttentionMetadata.from_lengths([5], [5], [[3]], 16, "cpu")
    with pytest.raises(ContractError, match="do not fit a graph"):
        vllm.AttentionState(runner()).begin_forward(SimpleNamespace(attn_metadata=common))


def test_both_classes_compose_in_a_model() -> None:
    """A prefill and two decodes, the decodes over the buffers, as one dense computation."""
    torch.manual_seed(0)
    of = runner()
    state = vllm.AttentionState(of)
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=TorchBackend)
    layer.kv_cache = [torch.zeros(TorchBackend.get_kv_cache_shape(8, 16, 2, 32))]
    whole = vllm.Attention(4, 32, 0.2, 2, attn_backend=TorchBackend)
    whole.kv_cache = [torch.zeros(TorchBackend.get_kv_cache_shape(8, 16, 2, 32))]
    q, k, v = torch.randn(7, 128), torch.randn(7, 64), torch.randn(7, 64)
    found = []
    for first, end in ((0, 5), (5, 6), (6, 7)):
        model_input = SimpleNamespace(attn_metadata=built(of, [end], [end - first]))
        state.begin_forward(model_input)
        with vllm.set_forward_context(model_input.attn_metadata):
            found.append(layer(*(x[first:end] for x in (q, k, v))))
    with vllm.set_forward_context(built(of, [7], [7])):
        torch.testing.assert_close(torch.cat(found), whole(q, k, v))


def test_metadata_of_attnlib_is_vllms_attention_metadata() -> None:
    metadata = built(runner(), [5], [5])
    assert isinstance(metadata, vllm.AttentionMetadata)
    assert issubclass(TorchBackend.get_metadata_cls(), vllm.AttentionMetadata)
    assert not isinstance(object(), vllm.AttentionMetadata)

    class Own(vllm.AttentionMetadata):
        pass

    assert not isinstance(metadata, Own)
