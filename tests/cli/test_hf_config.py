"""Specs from the configs of Hugging Face models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnlib.cli.hf_config import specs_from_config
from attnlib.cli.layer_kinds import has_states
from attnlib.errors import ContractError
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionType


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4},
            {"num_kv_heads": 4, "head_size": 16, "sliding_window": None},
        ),
        (
            {
                "model_type": "mistral",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "sliding_window": 8,
            },
            {"sliding_window": 8},
        ),
        (
            {
                "hidden_size": 64,
                "num_attention_heads": 4,
                "sliding_window": 8,
                "use_sliding_window": False,
            },
            {"sliding_window": None},
        ),
        (
            {"hidden_size": 64, "num_attention_heads": 4, "attn_logit_softcapping": 50.0},
            {"logits_soft_cap": 50.0},
        ),
        (
            {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4},
            {"attn_type": AttentionType.ENCODER_ONLY},
        ),
        (
            {"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4, "patch_size": 16},
            {"attn_type": AttentionType.ENCODER_ONLY},
        ),
        (  # a decoder over patches of bytes
            {"hidden_size": 64, "num_attention_heads": 4, "patch_size": 4, "vocab_size": 256},
            {"attn_type": AttentionType.DECODER},
        ),
        (
            {"model_type": "bloom", "n_head": 4, "hidden_size": 64},
            {"has_alibi": True, "head_size": 16},
        ),
        (
            {
                "model_type": "mpt",
                "n_heads": 4,
                "d_model": 64,
                "attn_config": {"alibi": True, "kv_n_heads": 2},
            },
            {"has_alibi": True, "num_kv_heads": 2},
        ),
        (
            {"hidden_size": 64, "num_attention_heads": 4, "multi_query": True, "num_kv_heads": 4},
            {"num_kv_heads": 1},
        ),
        (
            {
                "hidden_size": 64,
                "num_attention_heads": 4,
                "multi_query": True,
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
            },
            {"num_kv_heads": 2},
        ),
        (
            {
                "num_attention_heads": 4,
                "head_dim": 8,
                "kv_lora_rank": 9,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            {"head_size": 24, "head_size_v": 16, "num_kv_heads": 4},
        ),
        (
            {
                "model_type": "modernbert",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "local_attention": 128,
                "layer_types": ["sliding_attention"],
            },
            {"sliding_window": 65, "attn_type": AttentionType.ENCODER_ONLY},
        ),
        (
            {
                "hidden_size": 64,
                "num_attention_heads": 4,
                "layer_types": ["linear_attention", "full_attention"],
            },
            {"sliding_window": None, "head_size": 16},
        ),
        (
            {
                "model_type": "x",
                "text_config": {"hidden_size": 64, "num_attention_heads": 4, "dtype": "float16"},
            },
            {"dtype": torch.float16},
        ),
    ],
)
def test_keys_of_model_families(config: dict, expected: dict, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    spec = next(iter(specs_from_config(file).values()))
    assert {name: getattr(spec, name) for name in expected} == expected


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "gemma2", "sliding_window": 4096}, [SLIDING, FULL]),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, [SLIDING, FULL]),
        ({"text_config": {"model_type": "gemma3_text", "sliding_window": 9}}, [SLIDING, FULL]),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 1}, [FULL]),
        ({"model_type": "cohere2", "sliding_window": 9, "sliding_window_pattern": 4},
         [SLIDING, FULL]),
        ({"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": "LLLG"},
         [SLIDING, FULL]),
        ({"model_type": "gpt_oss", "sliding_window": 128}, [SLIDING, FULL]),
        ({"model_type": "modernbert", "local_attention": 128, "global_attn_every_n_layers": 3},
         [SLIDING, FULL]),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, ["chunked_attention", FULL]),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True,
          "max_window_layers": 3, "num_hidden_layers": 8}, [FULL, SLIDING]),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True,
          "max_window_layers": 8, "num_hidden_layers": 8}, [FULL]),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True,
          "max_window_layers": 0, "num_hidden_layers": 8}, [SLIDING]),
        ({"model_type": "mistral", "sliding_window": 9}, [SLIDING]),
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, [FULL]),
    ],
)  # fmt: skip
def test_kinds_that_published_configs_do_not_list(
    config: dict, kinds: list[str], tmp_path: Path
) -> None:
    """They have no `layer_types`; the classes of transformers make them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    inner = config.get("text_config", config)
    inner.update(sizes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_from_config(tmp_path)
    assert list(specs) == kinds
    assert [kind for kind, spec in specs.items() if spec.sliding_window] == [
        kind for kind in kinds if kind == SLIDING
    ]
    transformers = pytest.importorskip("transformers")
    if inner["model_type"] in ("mistral", "exaone4"):
        return  # all layers are of one kind; 5.24 does not read the published file
    made = transformers.AutoConfig.for_model(**inner)
    listed = dict.fromkeys(made.layer_types)
    assert sorted(kind for kind in listed if kind != "linear_attention") == sorted(kinds)


def test_sizes_that_a_config_leaves_to_its_class(tmp_path: Path) -> None:
    """Gemma 3 4B has no heads in its file."""
    config = {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ContractError, match="give --num-heads, --num-kv-heads and --head-size"):
        specs_from_config(tmp_path)
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_size": 256}
    (spec,) = specs_from_config(tmp_path, **sizes).values()
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (8, 4, 256)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"linear_num_value_heads": 32}, True),
        ({"layer_types": ["full_attention", "mlp"]}, False),
        ({}, False),
    ],
)
def test_models_with_states(config: dict, found: bool) -> None:
    assert has_states(config) == found


def test_latent_attention_has_two_forms(tmp_path: Path) -> None:
    """P10: DeepSeek V3 with keys and values of every head, and over latents."""
    file = tmp_path / "config.json"
    config = {
        "num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    file.write_text(json.dumps(config))
    specs = specs_from_config(file)
    assert list(specs) == ["full_attention", "full_attention over latents"]
    heads, latent = specs.values()
    assert (heads.num_kv_heads, heads.head_size, heads.head_size_v) == (128, 192, 128)
    assert not heads.use_mla and latent.use_mla and latent.num_heads == 128
    assert (latent.num_kv_heads, latent.head_size, latent.head_size_v) == (1, 576, 512)
    assert list(specs_from_config(file, head_size=64)) == ["full_attention"]


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no config file at"):
        specs_from_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ContractError, match="has no num_attention_heads"):
        specs_from_config(tmp_path)
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "layer_types": ["mamba"]}))
    with pytest.raises(ContractError, match="no attention layers: its layer_types are mamba"):
        specs_from_config(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**sizes, "layer_types": ["sliding_attention"]})
    )
    with pytest.raises(
        ContractError, match="sliding_attention layers and no sliding_window: give --sliding-window"
    ):
        specs_from_config(tmp_path)
    assert specs_from_config(tmp_path, sliding_window=9)["sliding_attention"].sliding_window == 9


def test_invalid_files_and_dtypes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ContractError, match="config.json is not valid JSON"):
        specs_from_config(file)
    config = {"hidden_size": 64, "num_attention_heads": 4, "torch_dtype": "float4"}
    file.write_text(json.dumps(config))
    with pytest.raises(ContractError, match="has dtype 'float4', which is not a torch dtype"):
        specs_from_config(file)
    (spec,) = specs_from_config(file, dtype=torch.float16).values()
    assert spec.dtype is torch.float16


def test_layers_whose_indexer_selects_keys(tmp_path: Path) -> None:
    """M11: lists of tokens, also over latents, and lists of blocks for each KV head."""
    config = {
        "model_type": "deepseek_v32", "num_attention_heads": 128, "hidden_size": 7168,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "layer_types": ["indexed_attention"], "index_topk": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_from_config(tmp_path)
    assert list(specs) == ["indexed_attention", "indexed_attention over latents"]
    assert {spec.key_selection for spec in specs.values()} == {KeySelection(max_blocks=2048)}
    config = {
        "model_type": "minimax_m3_vl_text", "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_topk_blocks": 16, "index_block_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_from_config(tmp_path)
    assert specs["full_attention"].key_selection is None
    expected = KeySelection(max_blocks=16, block_size=128, scope="kv_head")  # type: ignore[arg-type]  # converted
    assert specs["minimax_m3_sparse"].key_selection == expected


def test_layers_with_compressed_entries(tmp_path: Path) -> None:
    """M17: DeepSeek V4, whose keys are the values."""
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = {
        "model_type": "deepseek_v4", "num_attention_heads": 64, "num_key_value_heads": 1,
        "head_dim": 512, "sliding_window": 128, "index_topk": 512, "layer_types": kinds,
        "compress_rates": {kinds[1]: 4, kinds[2]: 128},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_from_config(tmp_path)
    assert list(specs) == kinds
    for spec in specs.values():
        assert spec.use_mla and spec.has_sink and spec.sliding_window == 128
        assert (spec.head_size, spec.head_size_v) == (512, 512)
    selected = CompressedEntries(compress_rate=4, selection=KeySelection(max_blocks=512))
    assert [spec.compressed_entries for spec in specs.values()] == [
        None, selected, CompressedEntries(compress_rate=128),
    ]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, "compress_rates": {}}))
    with pytest.raises(ContractError, match="no compress_rates for them"):
        specs_from_config(tmp_path)
