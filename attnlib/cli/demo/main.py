"""The command `attnlib demo`: the run and its exit status."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnlib import env, example_model
from attnlib.cli.demo.options import parser
from attnlib.cli.hf_config import specs_from_config
from attnlib.device import resolve_device
from attnlib.selection import explain
from attnlib.selection.current import current_request
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    from attnlib.cache.hybrid_allocator import HybridBlockAllocator
    from attnlib.cli.demo.model import DemoModel
    from attnlib.cli.demo.plain_blocks import PlainBlocks
    from attnlib.cli.demo.scheduler import Request
    from attnlib.integrations.transformers.paged_model import PagedModel

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
    from attnlib.cli.demo.model import load_model
    from attnlib.cli.demo.result import check_tokens
    from attnlib.cli.demo.scheduler import Scheduler
    from attnlib.cli.demo.serve import blocks_of, serve, warm_up
    from attnlib.cli.demo.view import Progress, as_json, show, statistics

    dtype = options.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    demo_model = load_model(options.model, device, dtype, seed=options.seed, tiny=options.tiny)
    requests = _requests(demo_model, options)
    budget = options.token_budget or (48 if options.tiny else 128)
    limits = BatchLimits(
        max_num_reqs=options.max_num_reqs,
        max_num_tokens=budget,
        max_seq_len=max(len(one.prompt) + one.max_new_tokens for one in requests),
    )
    paged = _paged(demo_model, requests, limits, options)
    scheduler = Scheduler(blocks_of(paged), budget, options.max_num_reqs)
    if not options.json:
        _introduce(demo_model, requests, paged, options, device)
    warmed = warm_up(paged, scheduler, requests) if device.type != "cpu" else 0.0
    served = serve(paged, scheduler, requests, None if options.json else Progress(requests))
    numbers = {**statistics(paged, requests, served), "warmup_seconds": warmed}
    result = check_tokens(demo_model.model, requests, served.logits)
    if options.json:
        print(json.dumps(as_json(demo_model, requests, numbers, result), indent=2))
    else:
        show(demo_model, requests, numbers, result)
    return 0 if result.passed else 1


def _introduce(
    demo_model: DemoModel,
    requests: list[Request],
    paged: PagedModel,
    options: argparse.Namespace,
    device: torch.device,
) -> None:
    """Print what will be served, and by which backends."""
    from attnlib.cli.demo.view import block_text

    is_example = demo_model.name == example_model.NAME
    terms = f" (terms of use: {example_model.TERMS})" if is_example else ""
    dtype = str(next(demo_model.model.parameters()).dtype).removeprefix("torch.")
    lengths = [len(request.prompt) for request in requests]
    print(
        f"{demo_model.name}{terms}, {dtype} on {device}\n"
        f"{len(requests)} prompts of {min(lengths)} to {max(lengths)} tokens, a cache of "
        f"{paged.num_blocks} blocks of {block_text(paged)}\n\n"
        f"{_selection(demo_model, options, device)}\n"
    )


def _device(name: str | None) -> torch.device:
    """The requested device; by default a GPU if there is one, else the CPU."""
    return torch.device(name or resolve_device(None).type)


def _requests(demo_model: DemoModel, options: argparse.Namespace) -> list[Request]:
    from attnlib.cli.demo.prompts import prompts
    from attnlib.cli.demo.scheduler import Request

    count = options.requests or (3 if options.tiny else 12)
    new_tokens = options.max_new_tokens or (4 if options.tiny else 24)
    return [
        Request(
            index,
            demo_model.encode(prompt.text),
            new_tokens,
            demo_model.end_tokens | (demo_model.line_ends if prompt.takes_one_line else set()),
        )
        for index, prompt in enumerate(prompts(count, tiny=options.tiny))
    ]


def _paged(
    demo_model: DemoModel,
    requests: list[Request],
    limits: BatchLimits,
    options: argparse.Namespace,
) -> PagedModel:
    """The model over its caches; one with states over a pool of keys and states. On a GPU its
    decodes run in CUDA graphs."""
    from attnlib.cli.demo.serve import blocks_of
    from attnlib.integrations.transformers.paged_model import PagedModel

    make = partial(
        PagedModel, demo_model.model, block_size=options.block_size, backend=options.backend
    )
    smallest = make(num_blocks=2)
    hybrid = bool(smallest.states.modules)
    if hybrid:
        smallest = make(num_blocks=2, hybrid=True)
    num_blocks = options.num_blocks or _tight_cache(requests, blocks_of(smallest))
    graphs = demo_model.model.device.type == "cuda"
    return make(num_blocks=num_blocks, hybrid=hybrid, limits=limits, cuda_graphs=graphs)


def _tight_cache(requests: list[Request], allocator: PlainBlocks | HybridBlockAllocator) -> int:
    """A number of blocks with which requests are preempted: less than all of them need together.
    Over states, those that hold only checkpoints remain for prefixes."""
    from attnlib.cache.hybrid_allocator import HybridBlockAllocator
    from attnlib.cli.demo.scheduler import most_blocks

    is_pool = isinstance(allocator, HybridBlockAllocator)
    blocks = [most_blocks(allocator, request) for request in requests]
    return max(*blocks, (4 if is_pool else 2) * sum(blocks) // 5) + is_pool  # with the null block


def _selection(demo_model: DemoModel, options: argparse.Namespace, device: torch.device) -> str:
    """The backend of each kind of layer in the config of the model, as text."""
    model = demo_model.model
    if not getattr(model.config.get_text_config(), "num_attention_heads", None):
        return "no attention layers: state layers only"
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        specs = specs_from_config(
            folder, dtype=next(model.parameters()).dtype, block_size=options.block_size
        )
    kinds: dict[str, list[str]] = {}  # table -> the kinds of layers that it is for
    for kind, spec in specs.items():
        kinds.setdefault(explain(spec, device, options.backend).choice(), []).append(kind)
    return "\n\n".join(
        table if len(specs) == 1 else f"{', '.join(names)}\n{table}"
        for table, names in kinds.items()
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
