"""Times of layers with a score function (M10) next to layers without, and torch's flex_attention.

    python benchmarks/gpu/score_functions.py --out score_functions.json
    python benchmarks/gpu/score_functions.py --rows plain        # also runs in trees without M10
    python benchmarks/gpu/score_functions.py --rows prefill --functions documents spans
    python benchmarks/gpu/score_functions.py --processes --out score_functions.json

Prefills of one request, decodes of a batch, 32/8 heads of 128, bfloat16, blocks of 16. Packed
documents are compared with the same documents as requests of their own. All rows of a group are
timed in turn, in CUDA graphs; flex_attention, compiled by torch, on contiguous keys without a paged
cache. "tiles" are documents of several lengths with each of the two tiles for exact bounds. Before
the timing, outputs of prefills are compared with those of flex_attention. At the end, random
batches are run after `attnlib.warmup`, and compiled kernels are counted.

With --processes, each group of rows has a process of its own. They compile at the same time, which
takes most of a run, and time one after another, when all of them have compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib.bench.provenance import provenance
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.testing.compilations import compiled_kernels

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda")
BASE: dict[str, Any] = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": torch.bfloat16,
    "block_size": 16,
}
DOCUMENTS = 8
FUNCTIONS = (
    "arithmetic", "alibi_sqrt", "relative_bias", "documents", "prefix_lm", "spans",
    "block_diffusion", "multi_item", "head_windows",
)  # fmt: skip
TURN = "SCORE_FUNCTIONS_TURN"
"""Environment variable of a process of --processes: folder, number of processes that time rows."""
LONGEST_WAIT = 45.0
"""Seconds that a process waits for the others at most, so that one that fails stops none."""


def decay(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """An arithmetic function: a penalty that grows with the distance, more for later heads."""
    return score - (q_pos - k_pos) * (head + 1) * 0.0001


class Row:
    """One layer over one batch, ready to be timed.

    Args:
        query_lens, seq_lens: of the requests.
        function: a score function, or None.
        copies: caches that are used in turn.
        kernels: setting of the triton backend.
    """

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        function: Any = None,
        copies: int = 1,
        kernels: str = "auto",
    ) -> None:
        fields = {} if function is None else {"score_function": function}
        if function is not None and function.needs_bidirectional:
            fields["mask_kind"] = "bidirectional"
        self.spec = attnlib.AttentionSpec(**BASE, **fields)
        made: dict[str, torch.Tensor] = {}
        if function is not None and function.examples is not None:
            made = dict(function.examples(self.spec.num_heads, seq_lens))
        own = {} if function is None else self._pick(made, function.layer_tensors)
        batch = {} if function is None else self._pick(made, function.batch_tensors)
        from attnlib.backends.loading import configured

        backend = configured(
            attnlib.get_attn_backend(self.spec, "triton", DEVICE), {"kernels": kernels}
        )
        more = {"score_tensors": own} if own else {}
        self.layer = attnlib.Attention(self.spec, backend=backend, device="cuda", **more)
        blocks = [-(-length // 16) for length in seq_lens]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).tolist()
        table, first = [], 0
        for count in blocks:
            table.append(order[first : first + count])
            first += count
        more = {"score_tensors": batch} if batch else {}
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, DEVICE, **more
        )
        self.metadata = backend.make_builder(self.spec, DEVICE).build(0, common)
        draw = torch.Generator(device=DEVICE).manual_seed(0)
        self.caches = []
        for _ in range(copies):
            cache = attnlib.PagedKVCache.allocate(self.spec, sum(blocks), DEVICE)
            cache.key_cache.normal_(generator=draw)
            cache.value_cache.normal_(generator=draw)
            self.caches.append(cache)
        tokens = sum(query_lens)
        sizes = [(tokens, heads, 128) for heads in (32, 8, 8)]
        self.query, self.key, self.value = (
            torch.randn(size, generator=draw, device=DEVICE, dtype=torch.bfloat16) for size in sizes
        )
        self.tensors = {name: tensor.to(DEVICE) for name, tensor in made.items()}
        self.copies = copies

    @staticmethod
    def _pick(made: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {name: made[name].to(DEVICE) for name in names}

    def __call__(self, number: int = 0) -> torch.Tensor:
        out: torch.Tensor = self.layer(
            self.query, self.key, self.value, self.caches[number], self.metadata
        )
        return out


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """With --processes: wait until all processes have compiled, then time alone."""
    if TURN not in os.environ:
        yield
        return
    name, count = os.environ[TURN].rsplit(":", 1)
    folder, begin = Path(name), time.monotonic()
    torch.cuda.synchronize()
    (folder / f"{os.getpid()}.ready").touch()
    while len(list(folder.glob("*.ready"))) < int(count):
        if time.monotonic() - begin > LONGEST_WAIT:
            break
        time.sleep(0.02)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compare(rows: dict[str, Callable[[int], Any]]) -> dict[str, dict[str, float]]:
    """Times of rows in turn; the copies of a row are used in turn too."""
    timers, expected = {}, {}
    for name, row in rows.items():
        try:
            expected[name] = warm_up(row, DEVICE)
            timers[name] = GraphTimer(row, getattr(row, "copies", 1), DEVICE, expected[name])
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    with turn():
        found = measure_in_turn(timers, expected)
    result = {name: {"us": m.us, "low": m.low, "high": m.high} for name, m in found.items()}
    for name, numbers in result.items():
        print(f"{name:40} {numbers['us']:10.1f} us", flush=True)
    return result


def flex_row(function: Any, row: Row, length: int) -> Callable[[int], torch.Tensor]:
    """The same function by torch's compiled flex_attention, on contiguous keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors, name = row.tensors, function.function.__name__
    score_mod = None

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    mask = causal
    if name == "decay":

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score - (q - k) * (h + 1) * 0.0001
    elif name == "_alibi_sqrt":
        slope = tensors["slope"]

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score - slope[h] * torch.sqrt(torch.abs(q - k).float())
    elif name == "_relative_bias":
        bias = tensors["bias"]

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score + bias[h, torch.clamp(q - k + 128, 0, 256)]
    elif name == "_causal_documents":
        begin = tensors["document_begin"][0].contiguous()

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (k >= begin[q])
    elif name == "_prefix_lm":
        prefix = tensors["prefix_len"][0, 0].clone()

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) | (k < prefix)
    elif name == "_spans":
        end = tensors["span_end"][0].contiguous()

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) | (k < end[q])
    elif name == "_block_diffusion":

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q // 32 >= k // 32
    elif name == "_head_windows":
        window = tensors["window"]

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (q - k < window[h])
    elif name == "_multi_item":
        prefix, item = tensors["prefix_len"][0, 0].clone(), tensors["item_begin"][0].contiguous()

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & ((k < prefix) | (k >= item[q]))

    heads = 32 if name == "_head_windows" else None
    blocks = create_block_mask(mask, None, heads, length, length, device="cuda")
    query = row.query.transpose(0, 1)[None]
    key, value = (x.transpose(0, 1)[None].contiguous() for x in (row.key, row.value))
    torch._dynamo.reset()  # otherwise the number of recompilations is limited
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(number: int = 0) -> torch.Tensor:
        out: torch.Tensor = compiled(
            query, key, value, score_mod=score_mod, block_mask=blocks, enable_gqa=True
        )
        return out

    return call


def prefills(length: int, with_flex: bool, names: list[str]) -> dict[str, Any]:
    """Prefills of one request of `length` tokens: each function, and flex_attention.

    Args:
        length: tokens of the request.
        with_flex: measure flex_attention too.
        names: functions to measure; empty for all.
    """
    from attnlib.score_functions import ScoreFunction, builtin

    def packed(num_heads: int, seq_lens: Any) -> dict[str, torch.Tensor]:
        size = length // DOCUMENTS
        return builtin.document_tensors([[size] * DOCUMENTS for _ in seq_lens], max(seq_lens))

    def windows(num_heads: int, seq_lens: Any) -> dict[str, torch.Tensor]:
        sizes = [128 << (head % 5) for head in range(num_heads)]
        return {"window": torch.tensor(sizes, dtype=torch.int32)}

    functions = {
        "arithmetic": ScoreFunction(decay),
        "alibi_sqrt": builtin.alibi_sqrt(),
        "relative_bias": builtin.relative_bias(),
        "documents": _with_examples(builtin.documents(), packed),
        "prefix_lm": builtin.prefix_lm(),
        "spans": builtin.bidirectional_spans(),
        "block_diffusion": builtin.block_diffusion(),
        "multi_item": builtin.multi_item(),
        "head_windows": _with_examples(builtin.head_windows(128, 2048), windows),
    }
    assert tuple(functions) == FUNCTIONS
    results: dict[str, Any] = {}
    size = length // DOCUMENTS
    plain = Row([length], [length])
    alone = Row([size] * DOCUMENTS, [size] * DOCUMENTS)
    for name, function in functions.items():
        if names and name not in names:
            continue
        row = Row([length], [length], function)
        rows: dict[str, Any] = {"plain": plain, name: row}
        if name == "documents":
            rows["documents as requests"] = alone
        error = None
        if with_flex:
            try:
                flex = flex_row(function, row, length)
                error = float((row(0).float() - flex(0)[0].transpose(0, 1).float()).abs().max())
                rows[f"{name}, flex_attention"] = flex
            except Exception as problem:
                print(f"flex {name}: {type(problem).__name__}: {problem}"[:600], file=sys.stderr)
        results[name] = {"times": compare(rows), "difference_from_flex": error}
        print(name, "difference from flex", error, flush=True)
    return results


def _with_examples(function: Any, examples: Callable[..., Any]) -> Any:
    """The function with other tensors. `dataclasses.replace` refuses functions that cannot be
    pickled, which these layers need not be."""
    changed = type(function).__new__(type(function))
    changed.__dict__.update({**function.__dict__, "examples": examples})
    return changed


def tiles(length: int) -> dict[str, dict[str, float]]:
    """Prefills of packed documents of equal lengths, with the tiles for short and long ranges."""
    from attnlib.score_functions import builtin

    rows = {}
    for size in (256 << power for power in range((length // 256).bit_length())):

        def packed(num_heads: int, seq_lens: Any, size: int = size) -> dict[str, torch.Tensor]:
            return builtin.document_tensors([[size] * (length // size)], length)

        # A bound above 1024 tokens selects the tile for long ranges.
        for name, longest in {"short": 1 << 30, "long": length}.items():
            function = _with_examples(builtin.documents(longest=longest), packed)
            rows[f"{length // size} of {size}, {name}"] = Row([length], [length], function)
    return compare(rows)


def decodes(requests: int, length: int) -> dict[str, Any]:
    """Decodes of a batch: a layer without a function and layers with one."""
    from attnlib.score_functions import ScoreFunction, builtin

    batch = ([1] * requests, [length] * requests)
    rows = {
        "plain": Row(*batch),
        "arithmetic": Row(*batch, ScoreFunction(decay)),
        "alibi_sqrt": Row(*batch, builtin.alibi_sqrt()),
        "relative_bias": Row(*batch, builtin.relative_bias()),
        "documents": Row(*batch, builtin.documents()),
    }
    return compare(rows)


def compiled_after_warmup(batches: int, names: list[str]) -> dict[str, int]:
    """Kernels that random batches compile after `attnlib.warmup`.

    Args:
        batches: number of batches.
        names: functions to measure; empty for all.
    """
    from attnlib.score_functions import ScoreFunction, builtin

    limits = attnlib.BatchLimits(max_num_reqs=8, max_num_tokens=1024, max_seq_len=2048)
    counts = {}
    for name, function in {
        "arithmetic": ScoreFunction(decay),
        "documents": builtin.documents(),
        "relative_bias": builtin.relative_bias(),
        "multi_item": builtin.multi_item(),
        "head_windows": builtin.head_windows(),
    }.items():
        if names and name not in names:
            continue
        spec = attnlib.AttentionSpec(**BASE, score_function=function)
        made = {} if function.examples is None else dict(function.examples(32, [8]))
        own = {n: made[n].cuda() for n in function.layer_tensors}
        layer = attnlib.Attention(spec, backend="triton", device="cuda", score_tensors=own)
        cache = attnlib.PagedKVCache.allocate(spec, 1100, "cuda")
        builder = layer.backend.make_builder(spec, "cuda", limits=limits)
        attnlib.warmup(layer, cache, limits, builder=builder)
        with compiled_kernels() as seen:
            for seed in range(batches):
                draw = random.Random(seed)
                decoding = draw.randint(0, 6)
                queries = [1] * decoding + [
                    draw.randint(9, 300) for _ in range(draw.randint(0 if decoding else 1, 2))
                ]
                lengths = [min(q + draw.randint(0, 1500), 2048) for q in queries]
                table = [list(range(-(-n // 16))) for n in lengths]
                made = {}
                if function.batch_tensors and function.examples is not None:
                    found = function.examples(32, lengths)
                    made = {n: found[n].cuda() for n in function.batch_tensors}
                common = attnlib.CommonAttentionMetadata.from_lengths(
                    queries, lengths, table, 16, DEVICE, score_tensors=made or None
                )
                shape = (sum(queries), (32 + 16) * 128)
                fused = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
                parts = fused.split([32 * 128, 8 * 128, 8 * 128], dim=1)
                layer(*parts, cache, builder.build(0, common))
        counts[name] = len(seen)
    return counts


def in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen rows in one process for each group and merge their results."""
    groups = [(row, "") for row in options.rows if row != "prefill"]
    if "prefill" in options.rows:
        groups += [("prefill", name) for name in options.functions or FUNCTIONS]
    timed = sum(row != "warmup" for row, _ in groups)
    more = ["--length", str(options.length), *(["--no-flex"] if options.no_flex else [])]
    result: dict[str, Any] = {"provenance": provenance(commit=options.commit)}
    with tempfile.TemporaryDirectory(prefix="score-functions-") as folder:
        running = []
        for number, (row, name) in enumerate(groups):
            out = Path(folder) / f"{number}.json"
            functions = [name] if name else options.functions
            command = [sys.executable, __file__, "--rows", row, *more, "--out", str(out)]
            command += ["--commit", options.commit] if options.commit else []
            command += ["--functions", *functions] if functions else []
            environment = {**os.environ, TURN: f"{folder}:{timed}"}
            running.append((out, subprocess.Popen(command, env=environment)))
        for out, process in running:
            if process.wait() or not out.exists():
                print(f"failed: {process.args}", file=sys.stderr)
                continue
            for key, value in json.loads(out.read_text()).items():
                if key.startswith("prefill"):
                    result.setdefault(key, {}).update(value)
                elif key != "provenance":
                    result[key] = value
    return result


def in_this_process(options: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen rows one after another."""
    result: dict[str, Any] = {"provenance": provenance(commit=options.commit)}
    if "plain" in options.rows:
        result["plain"] = compare(
            {
                "prefill 1 x 8k": Row([8192], [8192]),
                "prefill 4 x 1k after 7k": Row([1024] * 4, [8192] * 4),
                "decode 32 x 4k": Row([1] * 32, [4096] * 32),
                "decode 1 x 32k": Row([1], [32768], copies=4),
                "mixed": Row([1] * 16 + [2048], [4096] * 16 + [2048]),
            }
        )
    if "decode" in options.rows:
        result["decode 32 x 4k"] = decodes(32, 4096)
    if "tiles" in options.rows:
        result[f"tiles, 1 x {options.length}"] = tiles(options.length)
    if "warmup" in options.rows:
        result["kernels compiled after warmup"] = compiled_after_warmup(60, options.functions)
        print(result["kernels compiled after warmup"])
    if "prefill" in options.rows:
        result[f"prefill 1 x {options.length}"] = prefills(
            options.length, not options.no_flex, options.functions
        )
    return result


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rows", nargs="*", default=["plain", "prefill", "decode", "tiles", "warmup"]
    )
    parser.add_argument(
        "--functions", nargs="*", default=[], help="of prefill and warmup (default: all)"
    )
    parser.add_argument(
        "--processes", action="store_true", help="compile groups of rows at the same time"
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prefill")
    parser.add_argument("--no-flex", action="store_true", help="leave flex_attention out")
    parser.add_argument("--commit", help="commit of a copy without history")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    result = in_processes(options) if options.processes else in_this_process(options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
