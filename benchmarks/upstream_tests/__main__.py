"""Command line; see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from attnlib.bench.provenance import provenance
from benchmarks.upstream_tests.runner import Outcome, line_of, run_module
from benchmarks.upstream_tests.shims import install_flash_attn, install_flashinfer

FLASHINFER_FILES = (
    "test_batch_decode_kernels",
    "test_batch_prefill_kernels",
    "test_batch_prefill",
    "test_decode_fp8_calibration_scale",
    "test_decode_prefill_lse",
    "test_non_contiguous_decode",
    "test_non_contiguous_prefill",
    "test_page",
    "test_shared_prefix_kernels",
    "test_sliding_window",
    "test_tensor_cores_decode",
)
"""The tests of the two wrappers on FlashInfer's default kernels, of append and of merges. Other
files test other backends and data types of FlashInfer."""

MENTIONS = {
    "flash_attn": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
                   "kvpacked_func"),
    "flashinfer": ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
                   "append_paged_kv_cache", "merge_state"),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=("flash_attn", "flashinfer"))
    parser.add_argument("--source", type=Path, required=True, help="directory of the copy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sample", type=int, default=20, help="cases per test function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="tests with one of these in their name")
    parser.add_argument("--largest", type=int, default=1 << 62, help="largest integer parameter")
    parser.add_argument("--seconds", type=int, default=60, help="limit of one case")
    parser.add_argument("--minutes", type=float, default=1e6, help="no new case after this time")
    parser.add_argument("--shards", type=int, default=1, help="processes that share the sample")
    parser.add_argument(
        "--shard", type=int, default=-1, help="number of this process; -1: start all"
    )
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    options.end = time.monotonic() + 60 * options.minutes
    if options.shard < 0 and options.shards > 1:
        return _report(_run_shards(options), options)
    options.shard = max(options.shard, 0)
    # The packages in the names of these backends are replaced by attnlib in this process.
    os.environ["ATTNLIB_BACKEND"] = "-flash_attn,-flashinfer"
    if options.package == "flash_attn":
        install_flash_attn(options.source, options.device)
        paths = [options.source / "tests" / "test_flash_attn.py"]
    else:
        install_flashinfer(options.source, options.device)
        folder = options.source / "tests" / "attention"
        paths = [folder / f"{name}.py" for name in FLASHINFER_FILES]
    outcomes: list[Outcome] = []
    for path in paths:
        outcomes += run_module(path, MENTIONS[options.package], options, _skipped(options))
    if options.shards > 1:
        print(_MARK + json.dumps([vars(outcome) for outcome in outcomes]))
        return 0
    return _report(outcomes, options)


_MARK = "OUTCOMES "


def _run_shards(options: argparse.Namespace) -> list[Outcome]:
    """Run every shard in a process of its own, and add up the outcomes."""
    command = [sys.executable, "-m", "benchmarks.upstream_tests", *sys.argv[1:], "--shard"]
    processes = [
        subprocess.Popen([*command, str(shard)], stdout=subprocess.PIPE, text=True)
        for shard in range(options.shards)
    ]
    found: dict[str, Outcome] = {}
    with ThreadPoolExecutor(options.shards) as pool:
        outputs = list(pool.map(lambda process: process.communicate()[0], processes))
    for output in outputs:
        line = next(text for text in output.splitlines() if text.startswith(_MARK))
        for fields in json.loads(line.removeprefix(_MARK)):
            part = Outcome(**fields)
            total = found.setdefault(part.test, part)
            if total is part:
                total.counts, total.reasons = Counter(part.counts), Counter(part.reasons)
            else:
                total.counts += Counter(part.counts)
                total.reasons += Counter(part.reasons)
                total.wrong += part.wrong
    for total in found.values():
        print(line_of(total))
    return list(found.values())


def _skipped(options: argparse.Namespace) -> dict[str, str]:
    """Parts of names of tests that are not run, with the reason."""
    skipped = {
        "_bwd_": "checks the backward pass only",
        "smem_probe": "reads FlashInfer's internal plan",
        "nvfp4": "tests caches of 4-bit elements, which attnlib does not have",
    }
    skipped["decode_rejects_mismatched_q_len"] = (
        "expects errors for limits of FlashInfer's kernels that attnlib does not have"
    )
    if options.device == "cuda":
        reason = "expects an error that needs the lengths on the host; attnlib does not read them"
        return skipped | {"paged_block_table_bounds": reason}
    return skipped | {
        "cuda_graph": "needs a GPU: captures a CUDA graph",
        "race_condition": "needs a GPU: repeats a call hundreds of times",
    }


def _report(outcomes: list[Outcome], options: argparse.Namespace) -> int:
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for outcome in outcomes:
        totals += outcome.counts
        reasons += outcome.reasons
    print()
    for reason, number in reasons.most_common():
        print(f"{number:6} {reason}")
    print(dict(totals))
    if options.out is not None:
        command = "python -m benchmarks.upstream_tests " + " ".join(sys.argv[1:])
        document = {
            "provenance": provenance(command, options.commit),
            "totals": totals,
            "reasons": reasons,
            "tests": [vars(outcome) for outcome in outcomes],
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if totals["wrong"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
