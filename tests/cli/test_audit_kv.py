"""`attnlib audit-kv`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlib.cli.audit_tables import rank_correlation
from attnlib.cli.main import main
from attnlib.debug.record import save_recording
from attnlib.instrumentation import OBSERVERS
from attnlib.testing.case import Case
from tests import example_checkpoint
from tests.debug.recorded_calls import captured


def test_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for seed in (0, 1):
        step = captured(Case(batch="mixed", seed=seed))
        files.append(str(save_recording(step, tmp_path / f"call{seed}.pt")))
    status = main(
        ["audit-kv", "--recordings", *files, "--json", str(tmp_path / "audit.json"), "--layers",
         "--formats", "int8_per_token_head; fp8_e4m3"]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0 and "KV formats on 2 recorded calls" in printed
    assert "int4_per_group" not in printed and "call1" in printed
    found = json.loads((tmp_path / "audit.json").read_text())["layers"]
    assert set(found) == {"call0", "call1"}
    assert 0 < found["call0"]["int8_per_token_head"]["output_error"] < 0.02
    assert found["call0"]["int8_per_token_head"]["memory_saved"] == 1 - 36 / 64, "of 16 bits"
    total = json.loads((tmp_path / "audit.json").read_text())["total"]["int8_per_token_head"]
    errors = [found[name]["int8_per_token_head"]["output_error"] for name in found]
    assert total["output_error"] == pytest.approx((sum(x * x for x in errors) / 2) ** 0.5)


def test_layers_have_the_columns_of_the_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--layers` prints memory, errors and saturation of each layer."""
    files = []
    for seed in (0, 1):
        step = captured(
            Case(batch="q8s128", num_heads=4, num_kv_heads=2, head_size=32, scale=1.0, seed=seed)
        )
        files.append(str(save_recording(step, tmp_path / f"layers.{seed}.self_attn.pt")))
    status = main(
        ["audit-kv", "--recordings", *files, "--layers", "--formats", "int4_per_group",
         "--json", str(tmp_path / "audit.json")]
    )  # fmt: skip
    assert status == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("layer "))
    found = json.loads((tmp_path / "audit.json").read_text())["layers"]
    assert header.split() == "layer format bytes/token saved output LSE max saturated".split()
    for name, formats in found.items():
        for label, values in formats.items():
            line = next(line for line in lines if line.startswith(f"{name} {label}"))
            assert len(line) == len(header)
            assert line.removeprefix(f"{name} {label}").split() == [
                str(values["bytes_per_token"]),
                f"{values['memory_saved']:.0%}",
                *(f"{values[key]:.2e}"
                  for key in ("output_error", "mean_lse_error", "max_lse_error")),
                f"{values['saturation']:.2%}",
            ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--perplexity"], "--perplexity is for models"),
        (["--backend", "nope"], "--backend is for models"),
        (["--figure", "audit.bmp"], "--figure audit.bmp must end in .svg or .png"),
    ],
)
def test_options_without_an_effect_are_refused(
    options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save_recording(captured(Case(batch="mixed")), tmp_path / "call.pt")
    arguments = ["audit-kv", "--recordings", str(file), "--formats", "nvfp4", *options]
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_model_with_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a paged cache " * 4)
    status = main(
        ["audit-kv", "--model", "seeded", "--prompts", str(prompt), "--device", "cpu",
         "--backend", "torch", "--figure", str(tmp_path / "audit.svg"),
         "--formats", "int8_per_token_head;int4_per_group"]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0 and not OBSERVERS
    assert "small decoder, 4 layers" in printed and ", 56 tokens\n" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if "_per_" in line}
    assert float(rows["int8_per_token_head"][3]) < float(rows["int4_per_group"][3])
    assert (tmp_path / "audit.svg").read_text().startswith("<?xml")


def test_perplexity_of_several_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row goes through `PagedModel`; the errors of both texts are in the audit."""
    pytest.importorskip("transformers")
    texts = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for number, text in enumerate(texts):
        text.write_text(f"a paged cache {number} " * 3)
    labels = ["bfloat16", "int8_per_token_head", "int8_per_token_head, rotated",
              "int8_per_token_head, nvfp4 values, rotated", "int4_per_group, keys",
              "fp8_e4m3", "fp8_e4m3 per head"]  # fmt: skip
    target = tmp_path / "audit.json"
    arguments = ["audit-kv", "--model", "seeded", "--prompts", *map(str, texts), "--perplexity"]
    arguments += ["--device", "cpu", "--backend", "torch", "--formats", ";".join(labels)]
    assert main([*arguments, "--json", str(target)]) == 0 and not OBSERVERS
    printed, found = capsys.readouterr().out, json.loads(target.read_text())
    assert "2 texts of 48 tokens" in printed
    assert list(found["quality"]) == ["dtype of the model", *labels[:-1]]
    rows = {
        label: {name: one["kl"] for name, one in row.items()}
        for label, row in found["quality"].items()
    }
    assert set(rows["bfloat16"]) == {"first.txt", "second.txt"}
    for name in rows["bfloat16"]:
        assert rows["dtype of the model"][name] == 0
        assert 0 < rows["bfloat16"][name] < rows["int8_per_token_head"][name]
        assert rows["int8_per_token_head"][name] < rows["int4_per_group, keys"][name]
    line = [line for line in printed.splitlines() if line.startswith(f"{labels[3]} ")][-1]
    quality = found["quality"][labels[3]].values()
    mean = sum(one["kl"] for one in quality) / 2
    assert line.split()[-2] == f"{mean:.5f}"
    size = 8 * found["total"][labels[3]]["bytes_per_token"]
    plain = found["total"]["bfloat16"]["bytes_per_token"] / 2  # elements of a token
    assert line.removeprefix(labels[3]).split()[0] == f"{size / plain:.2f}"
    errors = [(found["total"][label]["output_error"], one) for label, one in _mean_kl(found)]
    assert f"output's error and KL: {rank_correlation(errors):.3f}" in printed
    assert found["total"][labels[3]]["memory_saved"] == pytest.approx(1 - 0.4, abs=0.05)


def _mean_kl(found: dict[str, Any]) -> list[tuple[str, float]]:
    """Label and KL of each format of a document of the command."""
    rows = list(found["quality"].items())[1:]
    return [(label, sum(one["kl"] for one in row.values()) / len(row)) for label, row in rows]


def test_rank_correlation() -> None:
    assert rank_correlation([(1.0, 2.0), (3.0, 9.0), (2.0, 5.0)]) == 1.0
    assert rank_correlation([(1.0, 9.0), (2.0, 5.0), (3.0, 2.0)]) == -1.0
    assert rank_correlation([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (4.0, 4.0)]) == pytest.approx(0.8)


def test_the_guide_has_the_committed_results() -> None:
    """The table of the guide is what `audit-kv` wrote."""
    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks/results/kv_quality.json").read_text())
    guide = (root / "docs/guides/quantized-caches.md").read_text()
    for label, row in result["quality"].items():
        kl = sum(one["kl"] for one in row.values()) / len(row)
        line = next(line for line in guide.splitlines() if line.startswith(f"|{label}|"))
        shown = "/".join(f"{one['perplexity']:.2f}" for one in row.values())
        assert line.split("|")[3:5] == [shown, f"{kl:.5f}"], label


@pytest.mark.parametrize("name", ["kv_quality", "kv_quality_smollm2"])
def test_the_committed_results_hold_their_bars(name: str) -> None:
    """Quality of the formats that the guide recommends, and the ranking of the audit."""
    root = Path(__file__).parents[2]
    found = json.loads((root / f"benchmarks/results/{name}.json").read_text())
    kl = dict(_mean_kl(found))
    assert kl["int8_per_token_head, rotated"] <= 0.0010
    for value in ("int4_per_group", "nvfp4"):
        assert kl[f"int8_per_token_head, {value} values, rotated"] <= 0.010
    errors = [(found["total"][label]["output_error"], one) for label, one in kl.items()]
    assert rank_correlation(errors) >= 0.95
    assert kl["int4_per_group, keys"] > 10 * kl["int4_per_group, values"]


def test_an_unknown_format_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-kv", "--formats", "fp3"]) == 2
    err = capsys.readouterr().err
    assert "--formats 'fp3' is neither a label (bfloat16; fp8_e4m3, scale 1" in err
    assert main(["audit-kv", "--formats", "int8_per_token_head+hadamard,nvfp4"]) == 2
    assert "write KEYS,VALUES+ROTATION" in capsys.readouterr().err


def test_the_example_model_and_its_text_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    example_checkpoint.install(monkeypatch, tmp_path)
    arguments = ["audit-kv", "--device", "cpu", "--max-tokens", "40", "--formats", "fp8_e5m2"]
    assert main(arguments) == 0
    assert "KV formats on Gemma 3 270M, 40 tokens\n" in capsys.readouterr().out


def test_without_the_extra_a_line_says_what_is_audited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    example_checkpoint.uninstall(monkeypatch)
    arguments = ["audit-kv", "--device", "cpu", "--max-tokens", "40", "--formats", "fp8_e5m2"]
    assert main(arguments) == 0
    shown, hints = capsys.readouterr()
    assert "KV formats on small decoder, 4 layers" in shown and ", 40 tokens\n" in shown
    assert hints.count("\n") == 1 and 'pip install "attnlib[model]"' in hints
