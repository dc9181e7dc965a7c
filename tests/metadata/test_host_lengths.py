"""Lengths that the host does not have: who needs them, and who does not."""

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.errors import ContractError
from attnlib.metadata.paged_builder import PagedMetadataBuilder
from attnlib.metadata.split import (
    leading_decodes,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
)

SPEC = attnlib.AttentionSpec(
    num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float32, block_size=16
)
UNKNOWN = {"query_start_loc_cpu": None, "seq_lens_cpu": None, "num_computed_tokens_cpu": None}


def _common(query_lens: list[int], seq_lens: list[int]) -> attnlib.CommonAttentionMetadata:
    rows = [[4 * row + column for column in range(4)] for row in range(len(query_lens))]
    return attnlib.CommonAttentionMetadata.from_lengths(query_lens, seq_lens, rows, 16, "cpu")


def _on_meta(common: attnlib.CommonAttentionMetadata) -> attnlib.CommonAttentionMetadata:
    """The batch on a device whose values the host cannot read."""
    assert common.block_table_tensor is not None and common.slot_mapping is not None
    return common.replace(
        query_start_loc=common.query_start_loc.to("meta"),
        seq_lens=common.seq_lens.to("meta"),
        block_table_tensor=common.block_table_tensor.to("meta"),
        slot_mapping=common.slot_mapping.to("meta"),
    )


def _run(backend: str, common: attnlib.CommonAttentionMetadata) -> torch.Tensor:
    torch.manual_seed(0)
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 16, "cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    q, k, v = (torch.randn(common.num_actual_tokens, heads, 16) for heads in (2, 1, 1))
    out: torch.Tensor = layer(
        q, k, v, cache, layer.backend.make_builder(SPEC, "cpu").build(0, common)
    )
    return out


@pytest.mark.parametrize("builder", [TorchBackend.make_builder(SPEC, "cpu"),
                                     PagedMetadataBuilder(SPEC, "cpu")])  # fmt: skip
@pytest.mark.parametrize("name", ["query_start_loc_cpu", "seq_lens_cpu"])
def test_a_builder_that_needs_host_lengths_names_itself_and_the_field(builder, name) -> None:
    common = _on_meta(_common([1, 9], [30, 9]))
    with pytest.raises(ContractError, match=rf"{type(builder).__name__} needs {name}.*meta"):
        builder.build(0, common.replace(**{name: None}))
    builder.build(0, common)


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 9], [9, 1]])
def test_on_a_cpu_the_batch_itself_has_the_lengths(query_lens: list[int]) -> None:
    common = _common(query_lens, [30, 33])
    assert torch.equal(_run("torch", common.replace(**UNKNOWN)), _run("torch", common))


def test_zeros_are_no_lengths() -> None:
    """An engine that passes zeros for unknown lengths would get rows of zeros."""
    common, zeros = _common([1, 1], [30, 9]), torch.zeros(2, dtype=torch.int32)
    builder = TorchBackend.make_builder(SPEC, "cpu")
    with pytest.raises(ContractError, match=r"seq_lens_cpu is \[0, 0\], but seq_lens is \[30, 9\]"):
        builder.build(0, common.replace(seq_lens_cpu=zeros))
    with pytest.raises(ContractError, match="seq_lens_cpu is 0 for all 2 requests.*None"):
        builder.build(0, _on_meta(common).replace(seq_lens_cpu=zeros))


def test_padding_without_new_tokens_may_have_length_0() -> None:
    TorchBackend.make_builder(SPEC, "cpu").build(0, _common([0, 0], [0, 0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("query_lens", [[1, 1], [1, 9]])
def test_triton_needs_the_bounds_only(query_lens: list[int]) -> None:
    pytest.importorskip("triton")
    common = _common(query_lens, [30, 33])
    unknown = common.replace(**UNKNOWN, max_seq_len=64)
    torch.testing.assert_close(_run("triton", unknown), _run("torch", common))


def test_without_query_lengths_a_batch_is_one_part() -> None:
    decodes, mixed = (_common(lens, [30, 33]).replace(**UNKNOWN) for lens in ([1, 1], [1, 9]))
    assert leading_decodes(decodes, 1) == (2, 2) and leading_decodes(mixed, 1) == (0, 0)
    with pytest.raises(ContractError, match="query_start_loc_cpu is None"):
        split_decodes_and_prefills(mixed)
    with pytest.raises(ContractError, match="split_decodes_prefills_and_extends needs"):
        split_decodes_prefills_and_extends(_on_meta(mixed))
    assert split_decodes_prefills_and_extends(mixed) == (1, 1, 0, 1, 9, 0)


def test_whether_a_batch_is_uniform_follows_from_the_bounds() -> None:
    builder = TorchBackend.make_builder(SPEC, "cpu")
    builder.cudagraph_support = attnlib.CudaGraphSupport.UNIFORM_BATCH
    uniform, ragged = (_common(lens, [30, 33]).replace(**UNKNOWN) for lens in ([4, 4], [3, 4]))
    assert builder.can_run_in_cudagraph(uniform) and not builder.can_run_in_cudagraph(ragged)


def test_slices_and_padded_batches_keep_unknown_lengths() -> None:
    common = _common([1, 1], [30, 9]).replace(**UNKNOWN)
    assert common.unpadded(1, 1).seq_lens_cpu is None
    limits = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64)
    builder = TorchBackend.make_builder(SPEC, "cpu", limits=limits)
    padded = attnlib.AttentionState(builder, limits).begin_forward(common, 4)
    assert (padded.query_start_loc_cpu, padded.seq_lens_cpu) == (None, None)
    assert padded.seq_lens.tolist() == [30, 9, 0, 0]
