"""The command line, as a user meets it."""

import json
import os
import subprocess
import sys

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.cli import doctor, main, subprocess_check
from attnlib.cli.hf_config import specs_from_config
from attnlib.cli.smoke_test import smoke_test
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.selection.registry import Registration
from attnlib.spec import AttentionType


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)


def test_usage_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "doctor" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("attnlib 0.")
    assert main(["dotcor"]) == 2 and "unknown command 'dotcor'" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--device", "cpu"]) == 0
    assert "torch        available    plain torch, on any device" in capsys.readouterr().out
    assert main(["list", "--device", "cpu", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (
        rows["torch"]["available"]
        and not rows["flashinfer"]["available"]
        and rows["flashinfer"]["reasons"]
    )


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
    assert main(["explain", "--device", "sm_75", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["spec"]
    reasons = {c["name"]: c["reasons"] for c in report["candidates"]}
    assert (
        report["chosen"] == "torch" and "compute capability 7.5 is below 8.0" in reasons["triton"]
    )


def test_explain_says_no_by_its_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--backend", "triton"]) == 1
    assert "attnlib chose no backend" in capsys.readouterr().out


def test_explain_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--num-heads", "7"]) == 2
    assert "num_heads=7 is not a multiple" in capsys.readouterr().err
    assert (
        main(["explain", "--backend", "tirton"]) == 2
        and "Did you mean 'triton'" in capsys.readouterr().err
    )
    assert (
        main(["explain", "--dtype", "float12"]) == 2
        and "--dtype float12 is no torch dtype" in capsys.readouterr().err
    )


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


def test_explain_a_model_by_its_config(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    assert main(["explain", "--config", str(tmp_path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sliding_attention\n") and "\n\nfull_attention\n" in shown
    specs = specs_from_config(tmp_path)
    assert (
        specs["sliding_attention"].sliding_window == 128
        and specs["full_attention"].sliding_window is None
    )
    assert all(
        spec.has_sink and spec.head_size == 64 and spec.num_kv_heads == 8 for spec in specs.values()
    )


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
def test_configs_of_other_models(config: dict, expected: dict, tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    (spec,) = specs_from_config(file).values()
    assert {name: getattr(spec, name) for name in expected} == expected


def test_configs_that_say_too_little(tmp_path) -> None:
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
        ContractError, match="sliding_attention layers and no sliding_window: give one"
    ):
        specs_from_config(tmp_path)
    assert specs_from_config(tmp_path, sliding_window=9)["sliding_attention"].sliding_window == 9


def test_doctor_runs_a_kernel_on_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in findings["backends"]}
    assert rows["torch"]["works"] and "off by" in rows["torch"]["finding"]
    assert findings["versions"]["torch"] == torch.__version__


def test_doctor_always_finishes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A probe that dies is a value."""
    monkeypatch.setattr(doctor, "_machine", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_backends", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        ("import os; os.abort()", "crashed its process: SIGABRT"),
        ("raise SystemExit(3)", "ended its process with status 3"),
        (
            "raise RuntimeError('no kernel image')",
            "ended its process with status 1 (RuntimeError: no kernel image)",
        ),
        ("print('hello')", "ended its process without a finding"),
        ("import time; time.sleep(60)", "did not finish within 0.5 s"),
    ],
)
def test_a_backend_that_takes_its_process_down_is_a_finding(
    program: str, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: and the doctor goes on to the next."""
    monkeypatch.setattr(subprocess_check, "_command", lambda name: [sys.executable, "-c", program])
    timeout = 0.5 if "sleep" in program else 60.0
    (row,) = subprocess_check.check_in_subprocesses([Registration("fragile", "x:Y")], timeout)
    assert row == {"name": "fragile", "works": False, "finding": finding, "remarks": []}


def test_the_doctor_knows_what_only_this_process_registered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attnlib.register_backend("mine", TorchBackend)
    try:
        assert main(["doctor", "--json"]) == 0
    finally:
        attnlib.unregister_backend("mine")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (
        rows["mine"]["works"]
        and not rows["flashinfer"]["works"]
        and rows["flashinfer"]["finding"].startswith("unavailable: ")
    )


def test_the_smoke_test_can_fail() -> None:
    class Wrong(TorchBackend.get_impl_cls()):
        def forward(self, query, cache, metadata, output, lse=None):
            super().forward(query, cache, metadata, output, lse)
            output.mul_(1.1)

    class Dead(TorchBackend.get_impl_cls()):
        def forward(self, query, cache, metadata, output, lse=None):
            raise RuntimeError("no kernel image is available for execution on the device")

    cpu = DeviceInfo("cpu")
    assert smoke_test(TorchBackend, cpu).startswith("ran ")
    assert smoke_test(
        type("W", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: Wrong)}), cpu
    ).startswith("WRONG ")
    assert "no kernel image" in smoke_test(
        type("D", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: Dead)}), cpu
    )


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnlib", "explain", "--device", "cpu"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0 and "attnlib chose torch" in done.stdout
