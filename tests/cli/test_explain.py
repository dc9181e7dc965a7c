"""`attnlib explain`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from attnlib.cli import main
from attnlib.cli.hf_config import specs_from_config
from attnlib.kv_dtype import PAGE_FORMATS


@pytest.fixture(autouse=True)
def _no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
}


def test_explain_a_spec_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "explain",
                "--device",
                "sm_90",
                "--has-sink",
                "--sliding-window",
                "128",
                "--head-size",
                "64",
            ]
        )
        == 0
    )
    assert "attnlib chose triton" in capsys.readouterr().out
    assert main(["explain", "--device", "sm_75"]) == 0
    assert capsys.readouterr().out.startswith(
        "a layer of 32 query heads, 8 KV heads, head size 128"
    )
    assert main(["explain", "--device", "sm_75", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["spec"]
    reasons = {c["name"]: c["reasons"] for c in report["candidates"]}
    assert (
        report["chosen"] == "torch" and "compute capability 7.5 is below 8.0" in reasons["triton"]
    )


def test_explain_divided_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """X4: a window of 128 keys is one of 32 on each of 4 ranks."""
    arguments = ["explain", "--device", "sm_90", "--sliding-window", "128", "--divide-keys", "4"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "divided keys: Interleaved(world_size=4, run=1)" in text
    assert "128 heads, each new token is a request" in text
    assert "a window of local keys" in text
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["divided_keys"] == [
        line for line in text[text.index("divided keys") :].splitlines()
    ]


def test_explain_for_a_gpu_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rankings of the chip, or of the nearest one, decide as they do on the GPU itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ATTNLIB_TUNING", raising=False)

    def shown(*arguments: str) -> str:
        assert main(["explain", *arguments]) == 0
        return " ".join(capsys.readouterr().out.split())

    text = shown("--device", "H200", "--kv-cache-dtype", "fp8_e4m3")
    assert "chose triton on NVIDIA H200, sm_90 (hypothetical device)" in text
    assert "measured fastest of triton, flashinfer for such layers on this chip" in text
    text = shown("--device", "NVIDIA H100 NVL")
    assert "for such layers on the NVIDIA H100 80GB HBM3, the nearest chip" in text
    assert "measured" not in shown("--device", "sm_90").replace("tiles, measured", "")
    assert main(["explain", "--device", "NVIDIA X1"]) == 2
    error = capsys.readouterr().err
    assert "device='NVIDIA X1' is not known" in error and "H20, H100, H200" in error


def test_the_exit_status_without_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--backend", "triton"]) == 1
    assert "attnlib chose no backend" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cuda"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("no CUDA device 0 is visible") == 1 and "  all  unavailable  " in shown


def test_a_reason_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The combination is one reason, whichever of its fields is named first."""
    arguments = ["--batch-invariant", "--kv-cache-dtype", "int8_per_token_head", "--json"]
    assert main(["explain", "--device", "sm_90", *arguments]) == 0
    candidates = json.loads(capsys.readouterr().out)["spec"]["candidates"]
    reasons = {candidate["name"]: candidate["reasons"] for candidate in candidates}
    assert reasons["triton"] == [
        "batch_invariant=True with kv_cache_dtype=int8_per_token_head: not supported"
    ]


def test_help_names_every_format_of_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    words = re.split(r"[\s,;]+", capsys.readouterr().out)
    assert {"auto", "fp8_e4m3", "bfloat16", *PAGE_FORMATS} <= set(words)


def test_invalid_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--num-heads", "7", "--num-kv-heads", "2"]) == 2
    assert "num_heads=7 is not a multiple" in capsys.readouterr().err
    assert (
        main(["explain", "--backend", "tirton"]) == 2
        and "Did you mean 'triton'" in capsys.readouterr().err
    )
    assert (
        main(["explain", "--dtype", "float12"]) == 2
        and "--dtype: float12 is not a torch dtype" in capsys.readouterr().err
    )


def test_explain_a_model_by_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    assert main(["explain", "--config", str(tmp_path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sliding_attention\n") and "\n\nfull_attention\n" in shown
    assert "state layers" not in shown
    specs = specs_from_config(tmp_path)
    assert (
        specs["sliding_attention"].sliding_window == 128
        and specs["full_attention"].sliding_window is None
    )
    assert all(
        spec.has_sink and spec.head_size == 64 and spec.num_kv_heads == 8 for spec in specs.values()
    )


def test_state_layers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hybrid model has layers that no flag describes."""
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS, "mamba_d_state": 128}))
    assert main(["explain", "--config", str(tmp_path), "--device", "cpu"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("the state layers of this model are not among them")


def test_chunked_layers_state_the_fallback_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which calls torch computes, whichever backend is selected; other layers have no such line."""
    config = {
        "model_type": "llama4_text",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_chunk_size": 8192,
        "layer_types": ["chunked_attention", "full_attention"],
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["explain", "--config", str(tmp_path), "--device", "sm_90"]
    assert main(arguments) == 0
    chunked, full = capsys.readouterr().out.split("\n\nfull_attention\n")
    assert "chose triton" in chunked and "note: in transformers, several queries" in chunked
    assert "8192" in chunked and "computed by torch, with a" in " ".join(chunked.split())
    assert "note:" not in full
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["chunked_attention"]["fallbacks"]) == 1
    assert "fallbacks" not in report["full_attention"]
