"""Command-line flags for a spec."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from attnlib.cache.pages import PAGE_LAYOUTS
from attnlib.cache.storage import PagedKVCache
from attnlib.cli.spec_flags import add_spec_flags, names_a_spec, spec_fields, specs_of
from attnlib.errors import ContractError
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, MaskKind


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_spec_flags(parser)
    return parser.parse_args(arguments)


def test_without_flags_the_default_layer_is_used() -> None:
    options = _parse()
    assert not names_a_spec(options) and spec_fields(options) == {}
    assert specs_of(options) == {
        "": AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    }


def test_flags_are_fields_of_the_spec() -> None:
    arguments = (
        "--num-heads 8 --dtype float16 --has-sink --mask-kind per_request --sliding-window 9"
    )
    options = _parse(*arguments.split())
    assert names_a_spec(options)
    (spec,) = specs_of(options).values()
    assert (spec.num_heads, spec.num_kv_heads, spec.dtype) == (8, 8, torch.float16)
    assert spec.has_sink and not spec.has_alibi and spec.sliding_window == 9
    assert spec.mask_kind is MaskKind.PER_REQUEST


def test_two_formats_are_one_word() -> None:
    arguments = "--kv-cache-dtype int8_per_token_head,nvfp4 --kv-rotation hadamard_keys"
    (spec,) = specs_of(_parse(*arguments.split())).values()
    assert (spec.kv_format.name, spec.value_format.name) == ("int8_per_token_head", "nvfp4")
    assert str(spec.kv_rotation) == "hadamard_keys"


def test_every_layout_of_pages_has_a_flag() -> None:
    for layout in PAGE_LAYOUTS:
        arguments = f"--kv-cache-dtype int8_per_token_head --kv-cache-layout {layout.lower()}"
        (spec,) = specs_of(_parse(*arguments.split())).values()
        assert PagedKVCache.allocate(spec, 1, "cpu").layout == layout


def test_a_key_selection_is_written_in_one_word() -> None:
    (spec,) = specs_of(_parse("--key-selection", "kv_head:128:16")).values()
    selection = spec.key_selection
    assert selection == KeySelection(max_blocks=16, block_size=128, scope="kv_head")
    for text in ("kv_head:128", "kv_head:x:16", "rows:1:1"):
        with pytest.raises(ContractError, match="write SCOPE:BLOCK_SIZE|must be one of"):
            specs_of(_parse("--key-selection", text))


def test_flags_override_the_config(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = specs_of(_parse("--config", str(tmp_path), "--num-kv-heads", "2"))
    assert specs == {
        "full_attention": AttentionSpec(
            num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32
        )
    }


@pytest.mark.parametrize("name", ["float12", "nn", "int32", "float8_e4m3fn"])
def test_an_unknown_dtype_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _parse("--dtype", name)
    assert f"{name} is not a torch dtype of a model; use bfloat16" in capsys.readouterr().err
