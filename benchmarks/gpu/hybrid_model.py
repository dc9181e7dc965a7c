"""Tokens per second of a model with state layers in the engine of `attnlib demo` and elsewhere.

    python -m benchmarks.gpu.hybrid_model --out hybrid_model.json --limit-seconds 90

The model has the shape of Qwen3-Next with fewer layers and experts, and random weights. First, in
float32, the tokens of the engine are compared with those that the model prefers without a cache,
with state layers in torch: flash-linear-attention multiplies float32 as TF32 (row `float32`).
Then, in bfloat16, random prompts of equal length are continued greedily by the engine, over one
pool of keys and states, and by `generate` with sdpa attention and the state layers of
flash-linear-attention, where it is installed. They take turns; the median of `--rounds` runs is
reported after one run of each, which compiles. In a row with a prefix, all prompts have their
first tokens in common, of which the engine reuses what `reused` says. The engine decodes in CUDA
graphs, as the demo; `eager` is the engine without them.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers

from attnlib.cli.demo.result import check_tokens
from attnlib.cli.demo.scheduler import Request, Scheduler, most_blocks
from attnlib.cli.demo.serve import blocks_of, serve
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.workspace import BatchLimits
from benchmarks.gpu import rows

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


class Row(NamedTuple):
    """A workload: requests, tokens of a prompt and new ones, and common tokens at the beginning."""

    requests: int
    prompt: int
    tokens: int
    common: int = 0

    def __str__(self) -> str:
        shared = f"-common{self.common}" if self.common else ""
        return f"{self.requests}x{self.prompt}+{self.tokens}{shared}"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random prompts."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(2, vocabulary, (self.requests, self.prompt), generator=draw)
        ids[:, : self.common] = ids[0, : self.common]
        found: list[list[int]] = ids.tolist()
        return found


ROWS = {
    str(row): row
    for row in (Row(1, 1000, 64), Row(16, 1000, 64), Row(64, 200, 32), Row(16, 3000, 32, 2500))
}
FLOAT32 = "float32"


def build_model(dtype: torch.dtype, device: str, sizes: dict[str, Any]) -> Any:
    """The model; no token ends a sequence."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **sizes, max_position_embeddings=16384, pad_token_id=0, bos_token_id=1, eos_token_id=None
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


class Engine:
    """The engine of the demo with a pool for all requests of a row at once.

    Attributes:
        reused: prompt tokens of the last run that came from another request.
    """

    def __init__(self, model: Any, row: Row, budget: int, cuda_graphs: bool = True) -> None:
        self.row, self.budget, self.reused = row, budget, 0
        requests = self._requests(model)
        smallest = blocks_of(PagedModel(model, num_blocks=2, hybrid=True))
        checkpoints = len(requests) if row.common else 0  # a state of each prompt, and its prefix
        needed = sum(most_blocks(smallest, request) for request in requests)
        states = most_blocks(smallest, requests[0])
        longest = row.prompt + row.tokens
        self.paged = PagedModel(
            model, num_blocks=1 + needed + checkpoints * states, hybrid=True,
            cuda_graphs=cuda_graphs,
            limits=BatchLimits(
                max_num_reqs=len(requests), max_num_tokens=budget, max_seq_len=longest
            ),
        )  # fmt: skip

    def _requests(self, model: Any) -> list[Request]:
        prompts = self.row.prompts(model.config.vocab_size)
        return [Request(n, prompt, self.row.tokens) for n, prompt in enumerate(prompts)]

    def run(self) -> list[list[int]]:
        """Serve the row with an empty cache; returns the new tokens of each request."""
        requests = self._requests(self.paged.model)
        scheduler = Scheduler(blocks_of(self.paged), self.budget, len(requests))
        serve(self.paged, scheduler, requests, keeps_logits=False)
        self.reused = sum(request.num_reused for request in requests)
        return [request.generated for request in requests]


def run_generate(model: Any, row: Row) -> list[list[int]]:
    """The new tokens of `generate`."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(row.prompts(model.config.vocab_size), device=model.device)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=row.tokens, do_sample=False
        )
    found: list[list[int]] = out[:, row.prompt :].tolist()
    return found


def timed(run: Callable[[], list[list[int]]], device: str) -> float:
    """Seconds of a run."""
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def check_float32(device: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the engine and of the model without a cache, in float32: prompts in chunks, with a
    common beginning."""
    model = build_model(torch.float32, device, sizes)
    prompts = Row(4, 300, 16).prompts(model.config.vocab_size)
    requests = [Request(n, prompt, 16) for n, prompt in enumerate(prompts)]
    smallest = blocks_of(PagedModel(model, num_blocks=2, hybrid=True))
    num_blocks = 1 + sum(most_blocks(smallest, request) for request in requests)
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=256, max_seq_len=316)
    paged = PagedModel(
        model, num_blocks=num_blocks, hybrid=True, limits=limits, cuda_graphs=device == "cuda"
    )
    served = serve(paged, Scheduler(blocks_of(paged), 256, 4), requests)
    with torch_states():
        result = check_tokens(model, requests, served.logits)
    return {
        "tokens": result.tokens,
        "identical": result.identical,
        "largest_error": result.largest_error,
        "passed": result.passed,
        "graphs": [] if paged.graphs is None else paged.graphs.captured,
        "backends": sorted({layer.backend.get_name() for layer in paged.all_layers()}),
    }


@contextmanager
def torch_states() -> Iterator[None]:
    """State layers of transformers in torch, in float32 of full precision."""
    module: Any = transformers.models.qwen3_next.modeling_qwen3_next
    names = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    before = {name: getattr(module, name) for name in names}
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        for name, function in before.items():
            setattr(module, name, inspect.unwrap(function))
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
        for name, function in before.items():
            setattr(module, name, function)


def measure(model: Any, row: Row, rounds: int, budget: int, device: str) -> dict[str, Any]:
    """Tokens per second of all in one row."""
    engine, eager = (Engine(model, row, budget, cuda_graphs=wanted) for wanted in (True, False))
    runs = {
        "attnlib": engine.run, "eager": eager.run, "transformers": lambda: run_generate(model, row)
    }  # fmt: skip
    first = {name: timed(run, device) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run, device))
    new = row.requests * row.tokens
    rates = {name: new / statistics.median(each) for name, each in seconds.items()}
    return {
        "tokens_per_second": rates,
        "ratio": rates["attnlib"] / rates["transformers"],
        "ratio_eager": rates["eager"] / rates["transformers"],
        "graphs": [] if engine.paged.graphs is None else engine.paged.graphs.captured,
        "seconds": seconds,
        "first_seconds": first,
        "reused": engine.reused,
        "pool_mib": engine.paged.cache_bytes / 2**20,
    }


class Session:
    """Measures rows, by name; the bfloat16 model is made for the first of them that needs it."""

    def __init__(self, layers: int, rounds: int, budget: int, device: str) -> None:
        self.sizes = {**SIZES, "num_hidden_layers": layers}
        self.rounds, self.budget, self.device = rounds, budget, device

    @functools.cached_property
    def model(self) -> Any:
        return build_model(torch.bfloat16, self.device, self.sizes)

    def measure(self, name: str) -> dict[str, Any]:
        """One row, and what it ran on."""
        if name == FLOAT32:
            found = check_float32(self.device, self.sizes)
        else:
            found = measure(self.model, ROWS[name], self.rounds, self.budget, self.device)
        return {**found, "sizes": self.sizes}


def main() -> int:
    parser = rows.parser(__doc__)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=8192)
    options = parser.parse_args()
    session = Session(options.layers, options.rounds, options.token_budget, "cuda")
    return rows.run(options, [FLOAT32, *ROWS], session.measure)


if __name__ == "__main__":
    sys.exit(main())
