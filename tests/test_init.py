"""The public names of the package."""

import importlib

import pytest

import attnlib

PUBLIC = """
Attention AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder AttentionSpec
AttentionState AttentionType AttnlibError BatchLimits BlockAllocator BlockTable Capabilities
CommonAttentionMetadata CudaGraphSupport MaskKind PagedKVCache Sizes explain
get_attn_backend list_backends register_backend select_for_groups use_backend warmup
StateCache StateCapabilities StateImpl StateLayer StateSpec
""".split()


def test_there_are_at_most_30_public_names() -> None:
    assert sorted(attnlib.__all__) == sorted([*PUBLIC, "__version__"])
    assert len(PUBLIC) <= 30


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_available(name: str) -> None:
    assert getattr(attnlib, name) is not None


def test_other_names_come_from_their_modules() -> None:
    assert attnlib.errors.AttnlibError is attnlib.AttnlibError
    with pytest.raises(AttributeError, match="'shadow'"):
        attnlib.shadow  # noqa: B018  # the attribute access is the test


def test_warmup_is_a_function() -> None:
    from attnlib.layer.warmup import warmup

    assert attnlib.warmup is warmup


def test_an_unknown_name_is_an_attribute_error_that_lists_the_public_names() -> None:
    with pytest.raises(AttributeError, match="AttentionSpec"):
        attnlib.Atention  # noqa: B018  # the attribute access is the test


METHODS = {
    "AttentionBackend": """
        copy_blocks full_cls_name get_builder_cls get_impl_cls get_kv_cache_shape
        get_kv_cache_stride_order get_metadata_cls get_name get_state_cls make_metadata swap_blocks
        validate_configuration
    """,
    "AttentionMetadata": "asdict_zerocopy decode_metadata prefill_metadata",
    "AttentionMetadataBuilder": """
        build build_for_cudagraph_capture can_run_in_cudagraph reorder_batch update_block_table
        use_cascade_attention
    """,
    "AttentionState": """
        begin_forward get_graph_input_buffers graph_capture_get_metadata_for_batch graph_clone
    """,
    "Attention": """
        calc_kv_scales extra_repr forward from_arguments get_attn_backend
        process_weights_after_loading
    """,
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_engines_for_vllm_call(name: str) -> None:
    for method in METHODS[name].split():
        assert hasattr(getattr(attnlib, name), method), f"{name}.{method}"


@pytest.mark.parametrize("package", ["attnlib.backends", "attnlib.metadata", "attnlib.ops"])
def test_packages_export_their_public_classes(package: str) -> None:
    """As vLLM's packages do: `from attnlib.backends import AttentionBackend`."""
    module = importlib.import_module(package)
    assert dir(module) == module.__all__ == sorted(module._PUBLIC)
    for name in module.__all__:
        assert getattr(module, name).__module__.startswith("attnlib.")
        assert getattr(module, name) is getattr(attnlib, name, getattr(module, name))
    with pytest.raises(AttributeError, match=module.__all__[0]):
        module.Missing  # noqa: B018  # the attribute access is the test


def test_names_that_users_of_vllm_look_for() -> None:
    from attnlib.backends import AttentionBackend, AttentionImpl
    from attnlib.metadata import (
        AttentionMetadata,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
    )

    for found in (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
    ):
        assert found is getattr(attnlib, found.__name__)
