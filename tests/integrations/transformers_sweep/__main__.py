"""Run every architecture of transformers with eager attention and with attnlib.

    python -m tests.integrations.transformers_sweep                 # all; writes the records
    python -m tests.integrations.transformers_sweep llama encoder   # model types and kinds; prints

The complete run appends to the file of records, and a second run of the same commit continues it.
With `--minutes` it stops in time: the file then has older records too, with their commits.
`python docs/generate.py` makes docs/transformers-models.md of the records.
Vision towers of `timm` need timm and torchvision.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

from attnlib.bench.provenance import provenance
from tests.integrations.transformers_sweep.architectures import architectures
from tests.integrations.transformers_sweep.runner import read_records, sweep

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "transformers_sweep.jsonl"
_FINE = ("correct", "refused", "unaffected")


def main() -> int:
    """Run, print the counts and write the records; 1 if anything is wrong or crashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types or kinds; all without")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help="limit per architecture")
    parser.add_argument("--minutes", type=float, default=600, help="start nothing after this time")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    started, every = time.perf_counter(), architectures()
    facts = {
        "commit": provenance()["commit"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    if arguments.names:
        chosen = [one for one in every if {one.model_type, one.kind} & set(arguments.names)]
        records = sweep(chosen, arguments.processes, arguments.seconds, facts)
    else:
        known = read_records(arguments.records)
        done = {one for one in every if known.get(one, {}).get("commit") == facts["commit"]}
        # The architectures that are not known to work come first.
        fine = {one for one in every if known.get(one, {}).get("outcome") in _FINE}
        waiting = sorted((one for one in every if one not in done), key=lambda one: one in fine)
        until = started + 60 * arguments.minutes
        sweep(waiting, arguments.processes, arguments.seconds, facts, arguments.records, until)
        known = read_records(arguments.records)
        records = [known[one] for one in every if one in known]
        lines = [json.dumps(record, sort_keys=True) + "\n" for record in records]
        arguments.records.write_text("".join(lines))
    counts = Counter(record["outcome"] for record in records)
    print(f"{dict(counts)} in {time.perf_counter() - started:.0f} s")
    return int(bool(counts["wrong"] or counts["crash"]))


if __name__ == "__main__":
    sys.exit(main())
