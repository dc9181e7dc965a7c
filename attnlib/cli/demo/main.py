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
from attnlib.cli.hf_config import specs_from_config
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.selection import explain

if TYPE_CHECKING:
    from attnlib.cli.demo.model import DemoModel

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0 if tokens and logits agree with the model's own eager attention, 1 if not, 2 if the demo
        cannot run.
    """
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        print(
            'attnlib demo runs a transformers model: pip install "attnlib[transformers]"',
            file=sys.stderr,
        )
        return 2
    device = _device(options.device)
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
    """The requested device; by default a GPU if there is one, else the CPU.

    Raises:
        ContractError: the device is unknown or not available.
    """
    device = resolve_device(name)
    if device.is_hypothetical or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ContractError(
            f"--device {name}: the device is not available (torch {torch.__version__}); use "
            "--device cpu"
        )
    return torch.device(name or device.type)


def _load_model(options: argparse.Namespace, device: torch.device) -> DemoModel:
    from attnlib.cli.demo.model import pretrained_model, seeded_model

    dtype = getattr(
        torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"), None
    )
    if not isinstance(dtype, torch.dtype):
        raise ContractError(
            f"--dtype {options.dtype} is not a torch dtype; use float32, bfloat16 or float16"
        )
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


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlib demo", description=__doc__)
    parser.add_argument(
        "--model",
        help="folder or name of a causal language model (default: a small decoder with seeded "
        "weights)",
    )
    parser.add_argument("--backend", help="as ATTNLIB_BACKEND")
    parser.add_argument("--device", help="default: a GPU if there is one, else the CPU")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument(
        "--requests", type=_count, help="number of prompts (default 12; 3 with --tiny)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_count,
        help="tokens to generate for each prompt (default 24; 4 with --tiny)",
    )
    parser.add_argument(
        "--block-size", type=_count, default=16, help="tokens in one cache block (default 16)"
    )
    parser.add_argument(
        "--num-blocks", type=_count, default=256, help="blocks in the cache (default 256)"
    )
    parser.add_argument(
        "--token-budget",
        type=_count,
        help="maximum number of tokens in one step (default 128; 48 with --tiny)",
    )
    parser.add_argument(
        "--max-num-reqs",
        type=_count,
        default=64,
        help="maximum number of requests in one step (default 64)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights of the default model"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a very small model and three short prompts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
