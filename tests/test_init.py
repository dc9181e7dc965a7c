"""The public names of the package."""

import pytest

import attnlib
from tests.fresh_process import run_program

PUBLIC = """
Attention AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder AttentionSpec
AttentionState AttentionType AttnlibError BatchLimits BlockAllocator BlockTable Capabilities
CommonAttentionMetadata CudaGraphSupport MaskKind PagedKVCache Sizes explain
get_attn_backend list_backends register_backend select_for_groups use_backend warmup
""".split()
OTHER = """
errors Window compute_slot_mapping get_kv_cache_layout set_kv_cache_layout shadow unregister_backend
""".split()


def test_there_are_at_most_25_public_names() -> None:
    assert sorted(attnlib.__all__) == sorted([*PUBLIC, "__version__"])
    assert len(PUBLIC) <= 25


@pytest.mark.parametrize("name", [*PUBLIC, *OTHER])
def test_every_name_is_available(name: str) -> None:
    assert getattr(attnlib, name) is not None


def test_names_outside_the_list_come_from_their_modules() -> None:
    from attnlib import compat
    from attnlib.debug.shadow import shadow

    assert attnlib.get_kv_cache_layout is compat.get_kv_cache_layout
    assert attnlib.set_kv_cache_layout is compat.set_kv_cache_layout
    assert attnlib.shadow is shadow
    assert attnlib.errors.AttnlibError.__module__ == "attnlib.errors"


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "import attnlib",
        "import attnlib, attnlib.warmup",
        "from attnlib.warmup import warmup; import attnlib",
        "from attnlib import warmup; import attnlib",
    ],
)
def test_warmup_can_be_called_however_it_is_imported(statement: str) -> None:
    """The function and its module have one name."""
    program = f"""{statement}
from attnlib.warmup import WarmupReport, warmup
try:
    attnlib.warmup()
except TypeError as error:
    print(error)
assert attnlib.warmup.WarmupReport is WarmupReport
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("warmup() missing")


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
