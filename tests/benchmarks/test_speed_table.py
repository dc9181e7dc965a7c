"""The table of speeds in the guide of Hugging Face models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.generated_pages import DOCS, generator

FACTS = {
    "command": "python generate.py", "commit": "abc", "torch": "2.1", "transformers": "5.9",
    "cpu": "a processor", "threads": 1,
}  # fmt: skip


def _write(path: Path, **found: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**FACTS, **found}))


def test_models_are_columns_of_the_table_of_their_chip(tmp_path: Path) -> None:
    rows = {
        "llama 1x10+2": {
            "sdpa": {"tokens_per_s": 80.0},
            "flash_attention_3": {"tokens_per_s": 200.0},
            "attnlib": {"tokens_per_s": 100.0},
        },
        "llama 4x10+2 padded": {
            "sdpa": {"tokens_per_s": 80.0, "ratio": 1.07},
            "flash_attention_2": {"error": "ImportError"},
            "attnlib": {"tokens_per_s": 88.0},
        },
    }
    _write(tmp_path / "h100" / "generate_llama.json", gpu="NVIDIA H100", rows=rows)
    rows = {
        "gemma 1x10+2": {"attnlib": {"tokens_per_s": 5.0}},
        "gemma 9x10+2 batch": {"attnlib": {"error": "no memory"}, "sdpa": {"tokens_per_s": 1.0}},
    }
    _write(tmp_path / "h100" / "generate_more.json", gpu="NVIDIA H100", rows=rows)
    again = {"llama 1x10+2": {"sdpa": {"tokens_per_s": 80.0}, "attnlib": {"tokens_per_s": 72.0}}}
    _write(
        tmp_path / "h100" / "generate_once_more.json", gpu="NVIDIA H100", rows=again, note="busy"
    )
    other = {"gpu": "NVIDIA H100", "transformers": "5.10", "rows": again}
    _write(tmp_path / "h100" / "generate_other_version.json", **other)
    results = {"batch 1": {"attnlib": 205.4, "sdpa": 200.0, "ratio": 1.049, "rounds": 5}}
    _write(tmp_path / "generate_overhead.json", results=results)
    _write(tmp_path / "h100" / "another.json", gpu="NVIDIA H100", rows=rows)
    speed = generator("transformers_speed")
    link = "../../benchmarks/results"
    text = speed.table(["h*/generate*.json", "generate_overhead.json", "none*.json"], tmp_path)
    assert text == (
        "| NVIDIA H100 | llama | gemma |\n|---|---|---|\n"
        "| 1x10+2 | 100 (1.25 sdpa, 0.50 FA3); 72 (0.90 sdpa) | 5 |\n"
        "| 4x10+2 padded | 88 (1.07 sdpa) |  |\n"
        "| 9x10+2 batch |  | failed |\n\n"
        "With torch 2.1, transformers 5.9:\n\n"
        f"- [h100/generate_llama.json]({link}/h100/generate_llama.json) at abc\n"
        f"- [h100/generate_more.json]({link}/h100/generate_more.json) at abc\n"
        f"- [h100/generate_once_more.json]({link}/h100/generate_once_more.json) at abc; busy\n\n"
        "| NVIDIA H100 | llama |\n|---|---|\n| 1x10+2 | 72 (0.90 sdpa) |\n\n"
        "With torch 2.1, transformers 5.10:\n\n"
        f"- [h100/generate_other_version.json]({link}/h100/generate_other_version.json) at abc\n\n"
        "| a processor, 1 thread | tokens/s |\n|---|---|\n| batch 1 | 205 (1.05 sdpa) |\n\n"
        "With torch 2.1, transformers 5.9:\n\n"
        f"- [generate_overhead.json]({link}/generate_overhead.json) at abc\n"
    )


def test_the_guide_shows_the_committed_results() -> None:
    speed = generator("transformers_speed")
    page = (DOCS / "guides" / "hugging-face.md").read_text()
    assert len(speed.MARKED.findall(page)) == 1 and speed.fill(page) == page
    assert page.index("<!-- speed: ") < page.index("```python"), "the guide begins with it"
    shown = speed.MARKED.search(page)
    assert shown is not None and "| batch 1 | " in shown[0]
    assert speed.fill(page.replace(" sdpa)", " other)")) == page
