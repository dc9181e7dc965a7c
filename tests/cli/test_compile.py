"""`attnlib compile`, and the kernels that `explain` and `doctor` show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlib.ahead_of_time import DescribedServer, StoredKernel, compilation
from attnlib.cli import kernels as cli_kernels
from attnlib.cli import main
from attnlib.cli.kernels import kernel_facts

pytest.importorskip("triton")

from attnlib.ops.triton.launch.described import NeededKernel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
KEYS = "ab" * 32, "01" * 32


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be compiled; two kernels result."""
    seen: list[Any] = []

    def compile_shares(given: list[Any]) -> list[list[StoredKernel]]:
        seen.extend(given)
        return [[StoredKernel("b_kernel", KEYS[0], 2.5)], [StoredKernel("a_kernel", KEYS[1], 0.0)]]

    monkeypatch.setattr(compilation, "_compile_shares", compile_shares)
    return seen


def test_compile_for_a_model(
    shares: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank of two, limits of the flags and of the config, a folder with its manifest."""
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--config", str(tmp_path), "--device", "H100", "--tensor-parallel", "2"]
    folder = tmp_path / "new" / "kernels"
    more = ["--out", str(folder), "--max-num-reqs", "8", "--processes", "2"]
    assert main(["compile", *arguments, *more]) == 0
    shown = capsys.readouterr().out
    assert "2 kernels for NVIDIA H100, sm_90 (hypothetical device), 132 multi" in shown
    assert "1 compiled, 1 found" in shown and f"ATTNLIB_KERNELS={folder}" in shown
    (server, (layer,), given, share), last = shares
    spec = layer.spec
    assert (spec.num_heads, spec.num_kv_heads, given, share) == (8, 2, folder, (0, 2))
    assert last[-1] == (1, 2) and server.limits.max_num_tokens == 8192
    assert (server.limits.max_num_reqs, server.limits.max_seq_len) == (8, 4096)
    (entry,) = json.loads((folder / "attnlib-kernels.json").read_text())["entries"]
    assert entry["kernels"] == [["a_kernel", KEYS[1]], ["b_kernel", KEYS[0]]]
    assert entry["chip"]["num_sms"] == 132 and list(entry["specs"]) == ["full_attention"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert main(["compile", *arguments, "--out", str(tmp_path / "other")]) == 2
    assert "is not a folder of kernels" in capsys.readouterr().err
    assert server.engine == "attnlib"
    assert main(["compile", *arguments, "--engine", "vllm", "--json"]) == 0
    assert shares[-1][0].engine == "vllm"
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["kernels"]] == [
        "a_kernel", "b_kernel",
    ]  # fmt: skip


def test_state_layers_are_left_to_the_server(
    shares: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-Next, whose published config lists no layers."""
    config = {
        "model_type": "qwen3_next", "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "hidden_size": 2048, "linear_num_value_heads": 32,
        "full_attention_interval": 4,
    }  # fmt: skip
    file = tmp_path / "config.json"
    for states in (True, False):
        file.write_text(json.dumps(config))
        assert main(["compile", "--config", str(file), "--device", "sm_90"]) == 0
        assert ("compiled on the server" in capsys.readouterr().out) == states
        assert main(["compile", "--config", str(file), "--device", "sm_90", "--json"]) == 0
        assert ("notes" in json.loads(capsys.readouterr().out)) == states
        config["linear_num_value_heads"] = 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: --device"),
        (["--device", "cpu"], "cpu has no kernels to compile: give a GPU, such as sm_90 or H200"),
        (["--device", "gfx942"], "is not an NVIDIA GPU whose shared memory is known"),
        (["--device", "sm_75"], "compute capability 7.5 is below 8.0"),
        (["--device", "sm_90", "--tensor-parallel", "3"], "cannot be divided among"),
        (["--device", "sm_90", "--max-num-reqs", "0"], "0 is below 1"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    reason: str,
    shares: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compile", *arguments]) == 2
    assert reason in capsys.readouterr().err and not shares


def test_explain_shows_which_kernels_are_there(
    shares: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = [NeededKernel("a_kernel", KEYS[0]), NeededKernel("b_kernel", KEYS[1])]
    servers: list[DescribedServer] = []
    monkeypatch.setattr(
        cli_kernels, "needed_kernels", lambda server, specs: servers.append(server) or needed
    )
    from attnlib.ops.triton.launch import kernel_folder

    monkeypatch.setattr(
        kernel_folder, "is_stored", lambda kernel, folder: kernel.name == "a_kernel"
    )
    assert main(["explain", "--device", "sm_90", "--kernels"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 kernels are in Triton's cache" in shown and "missing: b_kernel (1)" in shown
    assert servers[0].limits.max_num_reqs == 256 and servers[0].limits.max_seq_len == 32768

    folder = tmp_path / "kernels"
    assert main(["compile", "--device", "sm_90", "--out", str(folder)]) == 0
    capsys.readouterr()
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    arguments = ["--device", "sm_90", "--kernels", str(folder), "--json"]
    assert main(["explain", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["spec"]["kernels"]
    assert found["where"] == str(folder) and found["missing"] == {"b_kernel": 1}
    assert found["differences"] == ["DISABLE_PTXAS_OPT: none in the folder, true here"]
    monkeypatch.setenv("ATTNLIB_KERNELS", str(folder))
    assert kernel_facts() == {
        "Triton's cache": str(tmp_path / "cache"),
        "ATTNLIB_KERNELS": f"{folder}; 1 of 2 kernels for sm_90 (hypothetical device); not used: "
        "DISABLE_PTXAS_OPT: none in the folder, true here",
    }


def test_explain_on_another_backend_names_no_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "sm_90", "--backend", "torch", "--kernels"]) == 0
    assert "kernels are in" not in capsys.readouterr().out
    assert main(["explain", "--kernels", "no/such/folder"]) == 2
    assert "'no/such/folder' does not exist" in capsys.readouterr().err


def test_explain_names_what_kernels_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Platforms without triton can ask about kernels, and are told what is missing."""
    monkeypatch.setitem(sys.modules, "attnlib.backends.triton.chips", None)  # imports triton
    assert main("explain --device sm_90 --kernels".split()) == 2
    shown = capsys.readouterr().err
    assert "cannot be named here (import of" in shown and 'pip install "triton>=3.6"' in shown
