"""The public list: short, complete, and every name importable."""

import attnlib

PUBLIC = """
Attention AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder AttentionSpec AttentionState AttentionType BatchLimits
BlockAllocator BlockTable Capabilities CommonAttentionMetadata CudaGraphSupport MaskKind PagedKVCache Sizes Window compute_slot_mapping errors explain
get_attn_backend get_kv_cache_layout list_backends register_backend set_kv_cache_layout shadow unregister_backend use_backend __version__
""".split()


def test_the_list_is_what_is_written_here() -> None:
    assert sorted(attnlib.__all__) == sorted(PUBLIC)


def test_every_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(attnlib, name) is not None


def test_a_wrong_name_is_an_attribute_error_that_lists_the_right_ones() -> None:
    try:
        attnlib.Atention  # noqa: B018  # the attribute access is the test
    except AttributeError as error:
        assert "AttentionSpec" in str(error)
    else:
        raise AssertionError("a wrong name was found")


def test_seed_methods_exist() -> None:
    """Every method that the seed documents list."""
    for cls, methods in {
        attnlib.AttentionBackend: "copy_blocks full_cls_name get_builder_cls get_impl_cls get_kv_cache_shape get_kv_cache_stride_order "
        "get_metadata_cls get_state_cls make_metadata swap_blocks get_name validate_configuration",
        attnlib.AttentionMetadata: "asdict_zerocopy decode_metadata prefill_metadata",
        attnlib.AttentionMetadataBuilder: "build build_for_cudagraph_capture can_run_in_cudagraph use_cascade_attention reorder_batch "
        "update_block_table",
        attnlib.AttentionState: "begin_forward get_graph_input_buffers graph_capture_get_metadata_for_batch graph_clone",
        attnlib.Attention: "calc_kv_scales extra_repr forward get_attn_backend process_weights_after_loading from_arguments",
    }.items():
        for method in methods.split():
            assert hasattr(cls, method), f"{cls.__name__}.{method}"
