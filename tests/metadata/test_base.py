"""Builders: copies of metadata, and which batches can be captured."""

import copy
import pickle

import pytest
import torch

import attnlib
from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import LengthsRead
from attnlib.score_functions.builtin import documents
from attnlib.spec import AttentionSpec, CudaGraphSupport

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


def _batch(queries: list[int], sequences: list[int], **changes) -> CommonAttentionMetadata:
    table = [[8 * r + j for j in range(-(-s // 4))] for r, s in enumerate(sequences)]
    return CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu", **changes)


def test_zero_copy_dict_and_other_blocks() -> None:
    builder = TorchMetadataBuilder(SPEC, "cpu")
    built = builder.build(0, _batch([1], [9]))
    assert built.asdict_zerocopy()["seq_lens"] is built.seq_lens
    assert "seq_lens" not in built.asdict_zerocopy({"seq_lens"})
    other = builder.update_block_table(built, built.block_table + 1, built.slot_mapping + 4)
    assert (
        other.seq_lens is built.seq_lens
        and other.block_table.tolist() == (built.block_table + 1).tolist()
    )


@pytest.mark.parametrize(
    ("level", "queries", "fits"),
    [
        (CudaGraphSupport.NEVER, [1, 1], False),
        (CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, [1, 1], True),
        (CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, [2, 2], False),
        (CudaGraphSupport.UNIFORM_BATCH, [2, 2, 0], True),
        (CudaGraphSupport.UNIFORM_BATCH, [2, 1], False),
        (CudaGraphSupport.ALWAYS, [2, 9], True),
    ],
)
def test_what_can_be_captured(level: CudaGraphSupport, queries: list[int], fits: bool) -> None:
    builder = TorchMetadataBuilder(SPEC, "cpu")
    builder.cudagraph_support = level
    assert builder.can_run_in_cudagraph(_batch(queries, [q + 4 for q in queries])) is fits
    assert builder.full_cudagraph_supported is (level is CudaGraphSupport.ALWAYS)


@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:torch"])
def test_score_tensors_are_replaced_not_changed(backend: str) -> None:
    """A plan holds the addresses of the tensors: a changed entry would not be noticed."""
    spec = SPEC.replace(score_function=documents())
    layer = attnlib.Attention(spec, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 16, "cpu")
    torch.manual_seed(0)
    for part in (cache.key_cache, cache.value_cache):
        part.normal_()
    begins = torch.zeros(1, 9, dtype=torch.int32)
    built = layer.backend.make_builder(spec, "cpu").build(
        0, _batch([1], [9], score_tensors={"document_begin": begins})
    )
    query = torch.randn(1, 4, 8)
    outputs = [layer(query, None, None, cache, built) for _ in range(3)]
    part = built.decode_metadata
    tensors = part.score_tensors
    for change in (
        lambda: tensors.__setitem__("document_begin", begins + 5),
        lambda: tensors.update(document_begin=begins + 5),
        lambda: tensors.pop("document_begin"),
        lambda: tensors.__ior__({"document_begin": begins + 5}),
        tensors.clear,
    ):
        with pytest.raises(ContractError, match=r"document_begin .* assign metadata.score_tensors"):
            change()
    for copied in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert torch.equal(layer(query, None, None, cache, copied), outputs[0])
        with pytest.raises(ContractError):
            copied.decode_metadata.score_tensors["document_begin"] = begins
    if part is built:
        built.score_tensors = {**tensors, "document_begin": begins + 5}
        changed = layer(query, None, None, cache, built)
        begins += 5  # the values of a tensor may change, and reach the first plan
        assert not torch.equal(changed, outputs[0])
        built.score_tensors = {"document_begin": begins}
        assert torch.equal(layer(query, None, None, cache, built), changed)
        with pytest.raises(ContractError):
            built.score_tensors["document_begin"] = begins


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("queries", [[1, 1], [1, 10]], ids=["decodes", "mixed"])
@pytest.mark.parametrize("copies", [True, False], ids=["host copies", "none"])
@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:torch"])
def test_lengths_and_blocks_may_change_in_place(
    backend: str, copies: bool, queries: list[int], inference: bool
) -> None:
    """As those of CUDA graph buffers do, also after a first call."""
    with torch.inference_mode(inference):
        layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
        cache = attnlib.PagedKVCache.allocate(SPEC, 32, "cpu")
        torch.manual_seed(0)
        for part in (cache.key_cache, cache.value_cache):
            part.normal_()
        first, second = _batch(queries, [14, 17]), _batch(queries, [20, 30])
        both = [
            common.replace(
                seq_lens=common.seq_lens.clone(),
                seq_lens_cpu=common.seq_lens_cpu if copies or backend != "torch" else None,
                query_start_loc=common.query_start_loc.clone(),
                max_seq_len=32,
                block_table_tensor=second.block_table_tensor.clone(),
                slot_mapping=None,
            )
            for common in (first, second)
        ]
        builder = layer.backend.make_builder(SPEC, "cpu")
        built, expected = (builder.build(0, common) for common in both)
        query = torch.randn(sum(queries), 4, 8)
        for _ in range(3):
            layer(query, None, None, cache, built)
        both[0].seq_lens.copy_(second.seq_lens)
        found = layer(query, None, None, cache, built)
        assert torch.equal(found, layer(query, None, None, cache, expected))
        both[0].block_table_tensor += 1
        both[1].block_table_tensor += 1
        found = layer(query, None, None, cache, built)
        assert torch.equal(found, layer(query, None, None, cache, builder.build(0, both[1])))


@pytest.mark.parametrize("name", ["seq_lens", "query_start_loc"])
def test_changes_behind_lengths_that_were_read_are_noticed(name: str) -> None:
    """On a GPU a builder reads copies on the host, which do not follow."""
    common = _batch([1], [9])
    common.seq_lens, common.query_start_loc = torch.tensor([9]), torch.tensor([0, 1])
    read = LengthsRead(common)
    read.check()
    getattr(common, name).add_(1)
    with pytest.raises(ContractError, match=f"{name} changed in place after .* build the metadata"):
        read.check()
    with torch.inference_mode():
        common.seq_lens = torch.tensor([9])
        LengthsRead(common).check()
