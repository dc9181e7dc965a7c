"""Output of the demo: a progress bar, the tokens, the statistics and the result."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from typing import Any

from attnlib.cache.hybrid import KVCacheGroup
from attnlib.cli.demo.model import DemoModel
from attnlib.cli.demo.result import DemoResult
from attnlib.cli.demo.scheduler import Request
from attnlib.cli.demo.serve import ServingResult
from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["Progress", "as_json", "block_text", "show", "statistics"]

_WIDTH = 70
"""Characters of a prompt in one line."""


class Progress:
    """A progress bar on a terminal; in a log, one line per quarter."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._quarters = 0

    def __call__(self, served: ServingResult) -> None:
        """Draw the bar after a step."""
        tokens = sum(len(request.generated) for request in self._requests)
        total = sum(  # a request that has ended needs no more
            len(one.generated) if one.is_done else one.max_new_tokens for one in self._requests
        )
        filled = 30 * tokens // total
        bar = "#" * filled + "." * (30 - filled)
        line = f"[{bar}] {tokens}/{total} tokens, step {served.steps}"
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if tokens == total else "", flush=True)
        elif 4 * tokens // total > self._quarters:
            self._quarters = 4 * tokens // total
            print(line, flush=True)


def block_text(paged: PagedModel) -> str:
    """What a block holds."""
    sizes = [each.block_size for each in paged.groups.values() if isinstance(each, KVCacheGroup)]
    if not paged.hybrid:
        sizes = [paged.block_size]
    tokens = [f"{size} tokens" for size in sorted(set(sizes))]
    return " or ".join([*tokens, "a state"] if paged.states.modules else tokens)


def statistics(paged: PagedModel, requests: list[Request], served: ServingResult) -> dict[str, Any]:
    """The statistics of a run."""
    generated = sum(len(request.generated) for request in requests)
    latents = {}
    if paged.latents.modules:
        latents = {"expanded_cache_mib": paged.expanded_cache_bytes / 2**20}
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
        "block": block_text(paged),
        "cache_mib": paged.cache_bytes / 2**20,
        **latents,
        "preemptions": served.preemptions,
        "backends": sorted({layer.backend.get_name() for layer in paged.all_layers()}),
    }


def show(
    demo_model: DemoModel, requests: list[Request], numbers: dict[str, Any], result: DemoResult
) -> None:
    """Print tokens, statistics and the result."""
    print()
    if demo_model.decode is None:
        _show_tokens(requests)
    else:
        _show_texts(demo_model, requests, result)
    print(
        f"\n{numbers['generated_tokens']} tokens for {numbers['requests']} requests in "
        f"{numbers['seconds']:.2f} s and {numbers['steps']} steps: "
        f"{numbers['tokens_per_second']:.0f} tokens/s on {', '.join(numbers['backends'])}"
        + (
            f", after a warm-up of {numbers['warmup_seconds']:.1f} s"
            if numbers["warmup_seconds"]
            else ""
        )
    )
    print(
        f"prompts: {numbers['prompt_tokens']} tokens, {numbers['reused_prompt_tokens']} of them "
        f"reused from the cache; preemptions: {numbers['preemptions']}\n"
        f"cache: {numbers['peak_blocks']}/{numbers['cache_blocks']} blocks of "
        f"{numbers['block']} at peak, {numbers['cache_mib']:.2f} MiB"
    )
    if "expanded_cache_mib" in numbers:
        print(
            f"latent cache: {numbers['cache_mib']:.2f} MiB; expanded keys and values would need "
            f"{numbers['expanded_cache_mib']:.2f} MiB"
        )
    print(result)


def _show_tokens(requests: list[Request]) -> None:
    for request in requests[:4]:
        text = " ".join(map(str, request.generated[:12]))
        print(
            f"  request {request.index}: {len(request.prompt)} prompt tokens ({request.num_reused} "
            f"reused) -> tokens {text}{' ...' if len(request.generated) > 12 else ''}"
        )
    if len(requests) > 4:
        print(f"  ... and {len(requests) - 4} more")


def _show_texts(demo_model: DemoModel, requests: list[Request], result: DemoResult) -> None:
    """The end of each prompt, what the model wrote, and the numbers of its tokens."""
    print(f"     {'end of the prompt, then what the model wrote':{_WIDTH}}  tokens  reused   equal")
    for request in requests:
        prompt, written = (
            " ".join(_text(demo_model, ids).split()) for ids in (request.prompt, request.generated)
        )
        end = prompt if len(prompt) <= _WIDTH else f"...{prompt[3 - _WIDTH :]}"
        equal = f"{result.identical_by_request[request.index]}/{len(request.generated)}"
        print(
            f"{request.index:>3}  {end:{_WIDTH}}  {len(request.prompt):>6}  "
            f"{request.num_reused:>6}  {equal:>6}"
        )
        for number, line in enumerate(textwrap.wrap(written, _WIDTH - 3)):
            print(f"     {'   ' if number else '-> '}{line}")


def _text(demo_model: DemoModel, ids: list[int]) -> str:
    return demo_model.decode(ids) if demo_model.decode else ""


def as_json(
    demo_model: DemoModel, requests: list[Request], numbers: dict[str, Any], result: DemoResult
) -> dict[str, Any]:
    """The output as JSON values."""
    return {
        "model": demo_model.name,
        **numbers,
        "tokens": {request.index: request.generated for request in requests},
        "texts": {request.index: _text(demo_model, request.generated) for request in requests},
        "result": {**asdict(result), "passed": result.passed},
    }
