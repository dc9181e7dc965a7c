"""The text of docs/transformers-models.md, from the records of the sweep over transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["RECORDS", "page", "read_records"]

RECORDS = Path(__file__).parents[1] / "benchmarks" / "results" / "transformers_sweep.jsonl"

OUTCOMES = ("wrong", "crash", "correct", "refused", "unaffected", "skipped", "not run")
KINDS = {
    "decoder": "Decoders (`AutoModelForCausalLM`)",
    "encoder-decoder": "Encoder-decoders (`AutoModelForSeq2SeqLM`, `AutoModelForSpeechSeq2Seq`)",
    "vision-language": "Vision-language models (`AutoModelForImageTextToText`)",
    "encoder": "Encoders and other models (`AutoModelForMaskedLM`, `AutoModel`)",
}
MOST_NAMES = 8
_CASES = ("forward", "left padding", "right padding", "generate", "generate_batch", "autocast")

_INTRODUCTION = """\
Every architecture in the auto mappings of transformers {transformers}, with eager attention and
with attnlib (`torch` backend, float32, torch {torch}). The models are tiny and have random weights.
Run on {date} at commit {commit} with `python -m tests.integrations.transformers_sweep`. The
[records](../benchmarks/results/transformers_sweep.jsonl) have one line for each architecture: the
outcome, error and tolerance of every case, and the reason of every exception.

- **correct**: outputs agree with eager attention in forwards without padding and with padding on
  both sides or under `torch.autocast`, logits in `generate`, and tokens in `generate_batch`.
- **refused**: attnlib raises an error that names the cause.
- **unaffected**: the model computes its own attention, so attnlib is never called.
- **skipped**: the case does not work in transformers without attnlib either.
- **not run**: no tiny model or no inputs were found.

Where outputs depend on padding queries, eager and sdpa attention differ, and attnlib must agree
with sdpa. A class has one row of each kind: `sarvam_mla` is in that of `deepseek_v3`. The lists
name what is neither correct nor not run, at most eight models where attnlib is not the reason.
"""


def read_records(path: Path = RECORDS) -> list[dict[str, Any]]:
    """The records of a file, one for each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def page(records: list[dict[str, Any]], note: str = "") -> str:
    """The Markdown page.

    Args:
        records: as the sweep writes them.
        note: text after the title.
    """
    first = records[0]
    facts = {name: first[name] for name in ("transformers", "torch")}
    dates = sorted({str(record["date"]) for record in records})
    commits = Counter(str(record["commit"]) for record in records)
    made = ", ".join(f"{commit} ({count} rows)" for commit, count in commits.most_common())
    parts = [
        f"# transformers models\n\n{note}",
        _INTRODUCTION.format(**facts, date=" to ".join(dates), commit=made),
        "\n## Counts\n\n" + _counts(records),
        "\n## Exceptions\n\n" + _exceptions(records),
    ]
    for kind, title in KINDS.items():
        rows = [record for record in records if record["kind"] == kind]
        if rows:
            parts.append(f"\n## {title}\n\n" + _lists(rows))
    return "".join(parts)


def _counts(records: list[dict[str, Any]]) -> str:
    lines = [
        "| | " + " | ".join(OUTCOMES) + " | all |\n",
        "|---|" + "---:|" * (len(OUTCOMES) + 1) + "\n",
    ]
    for kind in (*KINDS, "all"):
        rows = [record for record in records if kind in (record["kind"], "all")]
        found = Counter(record["outcome"] for record in rows)
        cells = [str(found[outcome]) for outcome in OUTCOMES]
        lines.append(f"| {kind} | " + " | ".join(cells) + f" | {len(rows)} |\n")
    return "".join(lines)


def _exceptions(records: list[dict[str, Any]]) -> str:
    """A line for each reason why a case of a model that ran is not correct."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        for case in _CASES:
            result = record["cases"].get(case)
            if result is not None and result["outcome"] not in ("correct", "unaffected"):
                key = (f"`{case}`" if "gen" in case else case, _short(result["reason"]))
                found.setdefault((result["outcome"], key[1]), {})[key[0]] = None
    lines = ["| outcome | cases | reason | models |\n|---|---|---|---|\n"]
    for (outcome, reason), cases in sorted(found.items()):
        models = [
            record["model_type"]
            for record in records
            if any(_short(case["reason"]) == reason for case in record["cases"].values())
        ]
        lines.append(f"| {outcome} | {', '.join(cases)} | {reason} | {_names(models, outcome)} |\n")
    return "".join(lines)


def _short(reason: str) -> str:
    """The cause in a few words: without values, names of layers and advice, and as Markdown."""
    if reason.startswith("eager: "):
        return "fails with eager attention too"
    text = re.sub(r"^transformers: (sdpa |eager )?|_BatchError: |^\w+\.\d+:? ", "", reason)
    text = re.split(r"\. (?=[A-Z])|; |: https?://|, which | \(note|: \w+Config \{", text)[0]
    text = re.sub(r"have shape .*", "differ between tokens", text)
    text = re.sub(r"(layer type): .*", r"\1", text)
    text = re.sub(r"(has no attribute) .*", r"\1", text)
    text = re.sub(r"\s+", " ", text)[:110].strip()
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _lists(records: list[dict[str, Any]]) -> str:
    """The model types of the outcomes that say something about attnlib, besides correct."""
    lines = []
    for outcome in OUTCOMES:
        models = [record["model_type"] for record in records if record["outcome"] == outcome]
        if models and outcome not in ("correct", "not run"):
            lines.append(f"- **{outcome}** ({len(models)}): {_names(models, outcome)}\n")
    return "".join(lines)


def _names(models: Iterable[str], outcome: str) -> str:
    """The names; of outcomes that say nothing about attnlib only the first, and how many more."""
    names = sorted(set(models))
    most = len(names) if outcome in ("wrong", "crash", "refused") else MOST_NAMES
    text = ", ".join(f"`{name}`" for name in names[:most])
    return text + (f" and {len(names) - most} more" if len(names) > most else "")
