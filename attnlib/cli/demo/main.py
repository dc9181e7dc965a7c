"""The command `attnlib demo`: options, the run, and the exit status."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnlib import env
from attnlib.cache.allocator import BlockAllocator
from attnlib.cli.arguments import CommandParser, count, model_dtype, present_device, seed
from attnlib.cli.hf_config import specs_from_config
from attnlib.device import resolve_device
from attnlib.selection import explain
from attnlib.selection.current import current_request

if TYPE_CHECKING:
    from attnlib.cli.demo.model import DemoModel

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0 if tokens and logits agree with the model's own eager attention, 1 if not, 2 if the demo
        cannot run.
    """
    options = parser().parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        print(
            'attnlib demo runs a transformers model: pip install "attnlib[transformers]"',
            file=sys.stderr,
        )
        return 2
    device = _device(options.device)
    current_request(options.backend)  # a wrong name is refused before the model is loaded
    _interpret_if_requested(options.backend or env.read("ATTNLIB_BACKEND"), device)
    return _demo(options, device)


def _demo(options: argparse.Namespace, device: torch.device) -> int:
    # Imported here, because TRITON_INTERPRET must be set before triton is imported.
    from attnlib.cli.demo.model import prompts
    from attnlib.cli.demo.result import check_tokens
    from attnlib.cli.demo.scheduler import Request, Scheduler
    from attnlib.cli.demo.serve import serve, warm_up
    from attnlib.cli.demo.view import Progress, as_json, show, statistics
    from attnlib.integrations.transformers.paged_model import PagedModel

    demo_model = _load_model(options, device)
    count = options.requests or (3 if options.tiny else 12)
    new_tokens = options.max_new_tokens or (4 if options.tiny else 24)
    requests = [
        Request(index, demo_model.encode(text), new_tokens)
        for index, text in enumerate(prompts(count, tiny=options.tiny))
    ]
    paged = PagedModel(
        demo_model.model,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        backend=options.backend,
    )
    budget = options.token_budget or (48 if options.tiny else 128)
    scheduler = Scheduler(
        BlockAllocator(options.num_blocks, options.block_size), budget, options.max_num_reqs
    )
    if not options.json:
        print(
            f"{demo_model.name}, "
            f"{str(next(demo_model.model.parameters()).dtype).removeprefix('torch.')} on {device}\n"
        )
        print(_selection(demo_model, options, device), end="\n\n")
    warmed = warm_up(paged, scheduler, requests) if device.type != "cpu" else 0.0
    served = serve(paged, scheduler, requests, None if options.json else Progress(requests))
    numbers, result = (
        {**statistics(paged, requests, served), "warmup_seconds": warmed},
        check_tokens(demo_model.model, requests, served.logits),
    )
    if options.json:
        print(json.dumps(as_json(demo_model, requests, numbers, result), indent=2))
    else:
        show(demo_model, requests, numbers, result)
    return 0 if result.passed else 1


def _device(name: str | None) -> torch.device:
    """The requested device; by default a GPU if there is one, else the CPU."""
    return torch.device(name or resolve_device(None).type)


def _load_model(options: argparse.Namespace, device: torch.device) -> DemoModel:
    from attnlib.cli.demo.model import pretrained_model, seeded_model

    dtype = options.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if options.model:
        return pretrained_model(options.model, device, dtype)
    return seeded_model(device, dtype, options.seed, tiny=options.tiny)


def _selection(demo_model: DemoModel, options: argparse.Namespace, device: torch.device) -> str:
    """The selection for each kind of layer in the config of the model, as text."""
    model = demo_model.model
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        specs = specs_from_config(
            folder, dtype=next(model.parameters()).dtype, block_size=options.block_size
        )
    tables = {kind: str(explain(spec, device, options.backend)) for kind, spec in specs.items()}
    return "\n\n".join(
        table if len(tables) == 1 else f"{kind}\n{table}" for kind, table in tables.items()
    )


def _interpret_if_requested(name: str, device: torch.device) -> None:
    """Switch on Triton's interpreter if the triton backend is requested on a CPU."""
    if (
        device.type == "cpu"
        and "triton" in name.replace("-triton", "")
        and "TRITON_INTERPRET" not in os.environ
        and "triton" not in sys.modules
    ):
        os.environ["TRITON_INTERPRET"] = "1"
        print(
            "no GPU: Triton kernels run in the interpreter (TRITON_INTERPRET=1), which is slow; "
            "--tiny shortens the run",
            file=sys.stderr,
        )


def parser() -> CommandParser:
    """The arguments of `attnlib demo`."""
    made = CommandParser(
        prog="attnlib demo",
        description="Serve a batch of prompts with a transformers model whose layers attend over "
        "one paged cache: requests start and end at different steps, share prefixes, and are "
        "preempted if the cache is full. Then compare tokens and logits with the model's own eager "
        "attention. Exit status: 0 if they agree, 1 if not, 2 if the demo cannot run.",
        epilog="Without --model the weights are random and nothing is downloaded. With Qwen/"
        "Qwen3-0.6B or another name or folder, the demo prints the text that the model writes.",
    )
    made.add_argument(
        "--model",
        help="folder or name of a causal language model (default: a small decoder with seeded "
        "weights)",
    )
    made.add_argument("--backend", metavar="REQUEST", help="as ATTNLIB_BACKEND (default: auto)")
    made.add_argument(
        "--device",
        type=present_device,
        help="cpu, cuda or cuda:1 (default: a GPU if there is one, else the CPU)",
    )
    made.add_argument(
        "--dtype",
        type=model_dtype,
        help="bfloat16, float16 or float32 (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    _add_sizes(made)
    made.add_argument(
        "--seed", type=seed, default=0, help="seed of the weights of the default model (default 0)"
    )
    made.add_argument(
        "--tiny", action="store_true", help="a very small model and three short prompts"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _add_sizes(made: CommandParser) -> None:
    """Add the sizes of the batch and of the cache."""
    sizes = made.add_argument_group("sizes")
    for flag, default, about in (
        ("--requests", None, "number of prompts (default 12; 3 with --tiny)"),
        (
            "--max-new-tokens",
            None,
            "tokens to generate for each prompt (default 24; 4 with --tiny)",
        ),
        ("--block-size", 16, "tokens in one cache block (default 16)"),
        ("--num-blocks", 256, "blocks in the cache (default 256)"),
        (
            "--token-budget",
            None,
            "maximum number of tokens in one step (default 128; 48 with --tiny)",
        ),
        ("--max-num-reqs", 64, "maximum number of requests in one step (default 64)"),
    ):
        sizes.add_argument(flag, type=count, default=default, metavar="N", help=about)
