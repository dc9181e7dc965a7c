"""What the demo shows: the selection, a bar, the tokens, the figures, the verdict."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from attnlib.cli.demo.model import Subject
from attnlib.cli.demo.result import Verdict
from attnlib.cli.demo.scheduler import Request
from attnlib.cli.demo.serve import Served
from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["Progress", "as_json", "figures", "show"]


class Progress:
    """A bar on a terminal; elsewhere one line at each quarter, so that logs stay readable."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._total = sum(request.max_new_tokens for request in requests)
        self._told = 0

    def __call__(self, served: Served) -> None:
        """Draw it anew after a step."""
        done = sum(len(request.generated) for request in self._requests)
        filled = 30 * done // self._total
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{self._total} tokens, step {served.steps}"
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if done == self._total else "", flush=True)
        elif 4 * done // self._total > self._told:
            self._told = 4 * done // self._total
            print(line, flush=True)


def figures(paged: PagedModel, requests: list[Request], served: Served) -> dict[str, Any]:
    """The numbers of a run."""
    generated = sum(len(request.generated) for request in requests)
    return {
        "requests": len(requests),
        "steps": served.steps,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "reused_prompt_tokens": sum(request.num_reused for request in requests),
        "generated_tokens": generated,
        "seconds": served.seconds,
        "tokens_per_second": generated / served.seconds,
        "cache_blocks": paged.num_blocks,
        "peak_blocks": served.peak_blocks,
        "block_size": paged.block_size,
        "cache_mib": paged.cache_bytes / 2**20,
        "preemptions": served.preemptions,
        "backends": sorted({layer.backend.get_name() for layer, _ in paged.layers()}),
    }


def show(
    subject: Subject, requests: list[Request], numbers: dict[str, Any], verdict: Verdict
) -> None:
    """Tokens, figures and the verdict, for a reader."""
    print()
    for request in requests[:4]:
        text = subject.decode(request.generated)
        print(
            f"  request {request.index}: {len(request.prompt)} prompt tokens ({request.num_reused} reused) -> {text!r}"
        )
    if len(requests) > 4:
        print(f"  ... and {len(requests) - 4} more")
    print(
        f"\n{numbers['generated_tokens']} tokens for {numbers['requests']} requests in {numbers['seconds']:.2f} s and {numbers['steps']} steps: "
        f"{numbers['tokens_per_second']:.0f} tokens/s on {', '.join(numbers['backends'])}"
        + (
            f", after a warm-up of {numbers['warmup_seconds']:.1f} s"
            if numbers["warmup_seconds"]
            else ""
        )
    )
    print(
        f"prompts: {numbers['prompt_tokens']} tokens, {numbers['reused_prompt_tokens']} of them found in the cache; "
        f"cache: {numbers['peak_blocks']}/{numbers['cache_blocks']} blocks of {numbers['block_size']} tokens at its fullest, "
        f"{numbers['cache_mib']:.1f} MiB, {numbers['preemptions']} preemptions"
    )
    print(verdict)


def as_json(
    subject: Subject, requests: list[Request], numbers: dict[str, Any], verdict: Verdict
) -> dict[str, Any]:
    """The same as data."""
    tokens = {request.index: request.generated for request in requests}
    return {
        "model": subject.name,
        **numbers,
        "tokens": tokens,
        "verdict": {**asdict(verdict), "passed": verdict.passed},
    }
