"""Check and time variants of the Hopper prefill on the chip, beside plain Triton and FlashAttention-3.

    python benchmarks/gpu/prefill_probe.py                       # checks, then times
    python benchmarks/gpu/prefill_probe.py --do check --variants g g:single --cases ragged window
    python benchmarks/gpu/prefill_probe.py --do time --rows 16k 2k --variants g g:r56 plain fa3

A variant is `g`, the tile of the tables, with flags (direct, single, persist, nosec, n64, n128, sK for K stages, qK for K
tiles of queries, wK for K multiplying warpgroups, cR for R registers of their threads, rP for P of a loading warp's with
the rest for theirs), `plain` or `fa3`.
Units run in child processes under a watchdog, so that a kernel that hangs or faults costs one unit and not
the run; what a unit finds is printed at once, and all of it goes to $OUT/prefill_probe.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNIT_SECONDS = 75.0
BUDGET_SECONDS = 235.0

RAGGED = ([1, 7, 130, 0, 300, 33], [1, 40, 130, 0, 911, 2050])
CHECKS: dict[str, dict[str, Any]] = {
    "ragged": {"lens": RAGGED},
    "ragged-p32": {"lens": RAGGED, "page": 32},
    "ragged-p64": {"lens": RAGGED, "page": 64},
    "ragged-p128": {"lens": RAGGED, "page": 128},
    "ragged-p256": {"lens": RAGGED, "page": 256},
    "long": {"lens": ([4096, 512], [4096, 8000])},
    "long-p128": {"lens": ([4096, 512], [4096, 8000]), "page": 128},
    "bidirectional": {"lens": RAGGED, "causal": False},
    "window": {"lens": RAGGED, "window": [127, 0]},
    "window-own-key": {"lens": RAGGED, "window": [0, 0]},
    "window-both-sides": {"lens": RAGGED, "causal": False, "window": [200, 31]},
    "chunk": {"lens": RAGGED, "chunk": 256},
    "sinks": {"lens": RAGGED, "sinks": True},
    "cap-sinks": {"lens": RAGGED, "sinks": True, "cap": 50.0},
    "d64": {"lens": RAGGED, "heads": (64, 8), "d": 64, "sinks": True},
    "d64-group5": {"lens": RAGGED, "heads": (40, 8), "d": 64},
    "d64-mqa-window": {"lens": RAGGED, "heads": (64, 1), "d": 64, "window": [127, 0]},
    "d64-long": {"lens": ([4096, 512], [4096, 8000]), "heads": (64, 8), "d": 64, "page": 64},
    "d96": {"lens": RAGGED, "d": 96},
    "d192-128": {"lens": RAGGED, "heads": (8, 8), "d": 192, "dv": 128},
    "d256": {"lens": RAGGED, "heads": (16, 8), "d": 256},
    "d256-p128-cap": {"lens": RAGGED, "heads": (16, 8), "d": 256, "page": 128, "cap": 50.0},
    "group5": {"lens": RAGGED, "heads": (40, 8)},
    "group1": {"lens": RAGGED, "heads": (8, 8)},
    "mqa": {"lens": RAGGED, "heads": (32, 1)},
    "fp16": {"lens": RAGGED, "dtype": "float16"},
    "hnd": {"lens": RAGGED, "layout": "hnd"},
    "interleaved": {"lens": RAGGED, "layout": "interleaved"},
    "packed": {"lens": RAGGED, "layout": "packed"},
    "more-queries-than-keys": {"lens": ([20, 5], [10, 5])},
}
ROWS: dict[str, dict[str, Any]] = {
    "2k": {"lens": ([2048], [2048])},
    "4x4k": {"lens": ([4096] * 4, [4096] * 4)},
    "16k": {"lens": ([16384], [16384])},
    "32k": {"lens": ([32768], [32768])},
    "2k/32k": {"lens": ([2048], [32768])},
    "2k-p128": {"lens": ([2048], [2048]), "page": 128},
    "4x4k-p128": {"lens": ([4096] * 4, [4096] * 4), "page": 128},
    "16k-p128": {"lens": ([16384], [16384]), "page": 128},
    "32k-p128": {"lens": ([32768], [32768]), "page": 128},
    "2k/32k-p128": {"lens": ([2048], [32768]), "page": 128},
    "8k-d64-sinks": {"lens": ([8192], [8192]), "heads": (64, 8), "d": 64, "sinks": True},
    "8k-d64-w128": {
        "lens": ([8192], [8192]),
        "heads": (64, 8),
        "d": 64,
        "sinks": True,
        "window": [127, 0],
    },
    "8k-d256": {"lens": ([8192], [8192]), "heads": (16, 8), "d": 256},
    "mixed": {"lens": ([1] * 60 + [2048], [4096] * 60 + [2048])},
    "matmul": {},
}
DEFAULT_CHECK_VARIANTS = ["g", "g:single"]
DEFAULT_TIME_VARIANTS = ["g", "g:direct", "g:single", "g:nosec", "plain", "fa3"]


class Batch:
    """Random queries and a randomly scattered cache; all that may not be read is poison."""

    def __init__(self, case: dict[str, Any], poison: float, seed: int = 0) -> None:
        import torch

        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(seed)
        query_lens, seq_lens = case["lens"]
        heads, kv_heads = case.get("heads", (32, 8))
        self.d = case.get("d", 128)
        self.dv = case.get("dv", self.d)
        self.page = case.get("page", 16)
        self.dtype = getattr(torch, case.get("dtype", "bfloat16"))
        self.query_lens, self.seq_lens = list(query_lens), list(seq_lens)
        pages = [-(-n // self.page) for n in seq_lens]
        blocks = sum(pages) + 3
        self.key, self.value = self._cache(case.get("layout", "nhd"), blocks, kv_heads, device)
        self.key.fill_(poison)
        self.value.fill_(poison)
        order = torch.randperm(blocks, generator=generator, device=device)
        self.table = torch.full(
            (len(pages), max(pages) + 2), 1 << 30, dtype=torch.int32, device=device
        )
        taken = 0
        for request, count in enumerate(pages):
            mine = order[taken : taken + count]
            taken += count
            self.table[request, :count] = mine.int()
            length = seq_lens[request]
            if not length:
                continue
            positions = torch.arange(length, device=device)
            where = (mine[positions // self.page], positions % self.page)
            shape = (length, kv_heads)
            self.key[where] = torch.randn(*shape, self.d, generator=generator, device=device).to(
                self.dtype
            )
            self.value[where] = torch.randn(*shape, self.dv, generator=generator, device=device).to(
                self.dtype
            )
        self.starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
        self.lengths = torch.tensor(seq_lens, device=device).int()
        tokens = sum(query_lens) + case.get("padding", 3)
        self.query = torch.randn(tokens, heads, self.d, generator=generator, device=device).to(
            self.dtype
        )
        self.sinks = (
            torch.randn(heads, generator=generator, device=device) if case.get("sinks") else None
        )
        self.options = {
            "scale": self.d**-0.5,
            "causal": case.get("causal", True),
            "window": tuple(case.get("window", (-1, -1))),
            "attention_chunk_size": case.get("chunk", 0),
            "logits_soft_cap": case.get("cap", 0.0),
            "sinks": self.sinks,
        }

    def _cache(self, layout: str, blocks: int, kv_heads: int, device: Any) -> tuple[Any, Any]:
        import torch

        def empty(*shape: int) -> Any:
            return torch.empty(shape, dtype=self.dtype, device=device)

        if layout == "hnd":
            key, value = (empty(blocks, kv_heads, self.page, n) for n in (self.d, self.dv))
            return key.transpose(1, 2), value.transpose(1, 2)
        if layout == "interleaved":
            both = empty(blocks, 2, self.page, kv_heads, self.d)
            return both[:, 0], both[:, 1]
        if layout == "packed":
            both = empty(blocks, self.page, kv_heads, self.d + self.dv)
            return both[..., : self.d], both[..., self.d :]
        return empty(blocks, self.page, kv_heads, self.d), empty(
            blocks, self.page, kv_heads, self.dv
        )

    def outputs(self) -> tuple[Any, Any]:
        import torch

        tokens, heads, _ = self.query.shape
        out = torch.full((tokens, heads, self.dv), float("nan"), dtype=self.dtype, device="cuda")
        return out, torch.full((tokens, heads), float("nan"), device="cuda")

    def pairs(self) -> int:
        """Visible (query, key) pairs, for the count of operations."""
        import torch

        total = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            positions = torch.arange(seq_len - query_len, seq_len)
            last = positions + 1 if self.options["causal"] else torch.full_like(positions, seq_len)
            left = self.options["window"][0]
            first = (positions - left).clamp(min=0) if left >= 0 else torch.zeros_like(positions)
            total += int((last - first).clamp(min=0).sum())
        return total

    def reference(self) -> tuple[Any, Any]:
        """Float32 attention, request by request."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        out, lse = self.outputs()
        out = out.float().fill_(0.0)
        lse.fill_(float("-inf"))
        group = self.query.shape[1] // self.key.shape[2]
        start = 0
        for request, (query_len, seq_len) in enumerate(
            zip(self.query_lens, self.seq_lens, strict=True)
        ):
            rows = slice(start, start + query_len)
            start += query_len
            keys = torch.arange(seq_len, device="cuda")
            where = (self.table[request, keys // self.page].long(), keys % self.page)
            k = self.key[where].float().repeat_interleave(group, 1)
            v = self.value[where].float().repeat_interleave(group, 1)
            scores = (
                torch.einsum("qhd,khd->hqk", self.query[rows].float(), k) * self.options["scale"]
            )
            cap = self.options["logits_soft_cap"]
            if cap > 0:
                scores = cap * torch.tanh(scores / cap)
            visible = self._visible(
                torch.arange(seq_len - query_len, seq_len, device="cuda")[:, None], keys[None]
            )
            scores = scores.masked_fill(~visible, float("-inf"))
            if self.sinks is not None:
                column = self.sinks[:, None, None].expand(-1, query_len, 1)
                scores = torch.cat([scores, column], 2)
            total = torch.logsumexp(scores, 2)
            weights = torch.exp(scores - total[..., None]).nan_to_num(0.0)[..., :seq_len]
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
            lse[rows] = total.T
        return out, lse

    def _visible(self, position: Any, key: Any) -> Any:
        options = self.options
        visible = key >= 0
        if options["causal"]:
            visible = visible & (key <= position)
        left, right = options["window"]
        if left >= 0:
            visible = visible & (key >= position - left)
        if right >= 0:
            visible = visible & (key <= position + right)
        chunk = options["attention_chunk_size"]
        return visible & (key // chunk == position // chunk) if chunk else visible


def parse_tile(variant: str, d: int, dv: int) -> Any:
    from attnlib.ops.triton.heuristics.hopper_tiles import choose_hopper_tile

    tile = choose_hopper_tile(d, dv)
    for flag in variant.split(":")[1:]:
        change: dict[str, Any] = {
            "direct": {"staged_store": False},
            "persist": {"persistent": True},
            "single": {"persistent": False, "q_stages": 1},
            "nosec": {"sections": False},
        }.get(flag) or {
            "n": {"block_n": int(flag[1:] or 0) if flag[1:].isdigit() else 0},
            "s": {"stages": int(flag[1:] or 0) if flag[1:].isdigit() else 0},
            "q": {"q_stages": int(flag[1:] or 0)},
            "w": {"consumers": int(flag[1:] or 0)},
            "c": {"consumer_registers": int(flag[1:] or 0)},
            "r": {
                "producer_registers": int(flag[1:] or 0),
                "consumer_registers": 240 - (int(flag[1:] or 0) - 24) // 16 * 8,
            },
        }[flag[0]]
        tile = dataclasses.replace(tile, **change)
    return tile


def make_call(variant: str, batch: Batch, out: Any, lse: Any) -> Any:
    """A function without arguments that runs the variant on the batch."""
    arguments = (batch.query, batch.key, batch.value, batch.table, batch.starts, batch.lengths)
    bounds = {"max_query_len": max(batch.query_lens), "max_seq_len": max(batch.seq_lens)}
    if variant == "plain":
        from attnlib.ops.params import AttentionParams
        from attnlib.ops.triton.paged_prefill import paged_prefill

        params = AttentionParams(**batch.options)
        return lambda: paged_prefill(
            *arguments, params, **bounds, out=out, lse=lse, kernels="portable"
        )
    if variant == "fa3":
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        window = batch.options["window"]
        table = batch.table.clamp(max=batch.key.shape[0] - 1)
        sinks = {} if batch.sinks is None else {"s_aux": batch.sinks.to(batch.dtype)}
        return lambda: flash_attn_varlen_func(
            q=batch.query, k=batch.key, v=batch.value, out=out, cu_seqlens_q=batch.starts, seqused_k=batch.lengths,
            max_seqlen_q=bounds["max_query_len"], max_seqlen_k=bounds["max_seq_len"],
            softmax_scale=batch.options["scale"], causal=batch.options["causal"], window_size=list(window),
            block_table=table, softcap=batch.options["logits_soft_cap"], fa_version=3, **sinks,
        )  # fmt: skip
    from attnlib.ops.triton.hopper.prefill_plan import launch_hopper_prefill

    tile = parse_tile(variant, batch.d, batch.dv)
    return lambda: launch_hopper_prefill(
        *arguments, tile, max_seq_len=bounds["max_seq_len"], **batch.options, out=out, lse=lse
    )


def check(name: str, variant: str) -> dict[str, Any]:
    """Errors against the reference, bits over two runs, and bits over two kinds of poison."""
    import torch

    found = []
    for poison in (float("nan"), 30000.0):
        batch = Batch(CHECKS[name], poison)
        for _ in range(2):
            out, lse = batch.outputs()
            make_call(variant, batch, out, lse)()
            torch.cuda.synchronize()
            found.append((out, lse))
    want, want_lse = batch.reference()
    out, lse = found[0]
    tokens = sum(batch.query_lens)
    error = float((out.float() - want).norm() / want.norm())
    finite = want_lse.isfinite()
    lse_error = float((lse - want_lse)[finite].abs().max()) if bool(finite.any()) else 0.0
    bits = [
        torch.equal(a.view(torch.int16), out.view(torch.int16)) and torch.equal(b, lse)
        for a, b in found[1:]
    ]
    verdict = {
        "error": error,
        "largest": float((out.float() - want).abs().max()),
        "lse": lse_error,
        "infinite": bool(torch.equal(lse[~finite], want_lse[~finite])),
        "tail": bool((out[tokens:] == 0).all()),
        "repeats": bits[0],
        "poison": bits[1] and bits[2],
    }
    limit = 6e-3 if batch.dtype == torch.bfloat16 else 1e-3
    verdict["ok"] = bool(
        error < limit
        and lse_error < 2e-3
        and all(v for v in verdict.values() if isinstance(v, bool))
    )
    verdict["ok"] = verdict["ok"] and all(v for v in verdict.values() if isinstance(v, bool))
    return verdict


def measure(call: Any) -> float:
    """Median seconds of one call, by CUDA-graph replay where it can be captured."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(1, min(50, int(0.02 / max(time.perf_counter() - began, 1e-6))))
    graph = None
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    except Exception:
        graph = None
        torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if graph is not None:
            graph.replay()
        else:
            for _ in range(calls):
                call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times[2:])


def timing(name: str, variant: str) -> dict[str, Any]:
    """Seconds and TFLOP/s of one variant on one row."""
    import torch

    if name == "matmul":
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        seconds = measure(lambda: a @ b)
        return {"us": seconds * 1e6, "tflops": 2 * 8192**3 / seconds * 1e-12}
    batch = Batch({**ROWS[name], "padding": 0}, 0.0)
    out, _ = batch.outputs()
    seconds = measure(make_call(variant, batch, out, None))
    operations = 2 * (batch.d + batch.dv) * batch.query.shape[1] * batch.pairs()
    return {"us": seconds * 1e6, "tflops": operations / seconds * 1e-12}


def serve() -> None:
    """Child: read units from stdin, write one JSON line for each."""
    sys.path.insert(0, str(ROOT))
    for line in sys.stdin:
        kind, name, variant = json.loads(line)
        try:
            found = check(name, variant) if kind == "check" else timing(name, variant)
        except BaseException:
            found = {"failed": traceback.format_exc()[-900:]}
        print("@" + json.dumps(found), flush=True)


class Child:
    """A process that serves units; killed and started again when it is silent for too long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, unit: tuple[str, str, str], seconds: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, os.path.abspath(__file__), "--serve"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        process, lines, noise = self._process, queue.Queue[str](), []
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(unit) + "\n")
        process.stdin.flush()

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
                if line.startswith("@"):
                    return
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = lines.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                return {"failed": f"silent for {seconds:.0f} s: killed. " + "".join(noise)[-500:]}
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                if "failed" in found:
                    self.close()
                return found
            if not line:
                self.close()
                return {"failed": "process died. " + "".join(noise)[-700:]}
            noise.append(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def show(unit: tuple[str, str, str], found: dict[str, Any]) -> None:
    kind, name, variant = unit
    if "failed" in found:
        print(
            f"{kind} {name:24} {variant:18} FAILED\n    "
            + found["failed"].strip().replace("\n", "\n    "),
            flush=True,
        )
    elif kind == "check":
        state = (
            "ok"
            if found["ok"]
            else "WRONG " + json.dumps({k: v for k, v in found.items() if v is False})
        )
        print(f"check {name:24} {variant:12} error {found['error']:.2e} largest {found['largest']:.2e} "
              f"lse {found['lse']:.1e} {state}", flush=True)  # fmt: skip


def table(results: dict[tuple[str, str, str], dict[str, Any]], variants: list[str]) -> None:
    width = max(len(v) for v in variants) + 2
    print(f"{'TFLOP/s (ratio to fa3)':16}" + "".join(f"{v:>{max(width, 14)}}" for v in variants))
    for name in dict.fromkeys(row for kind, row, _ in results if kind == "time"):
        peer = results.get(("time", name, "fa3"), {}).get("tflops")
        cells = []
        for variant in variants:
            found = results.get(("time", name, variant), {})
            rate = found.get("tflops")
            text = (
                "-" if rate is None else f"{rate:.0f}" + (f" ({rate / peer:.3f})" if peer else "")
            )
            if rate is not None and found["us"] < 200:
                text += f" {found['us']:.0f}us"
            cells.append(f"{text:>{max(width, 14)}}")
        print(f"{name:22}" + "".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--do", nargs="+", choices=["check", "time"], default=["check", "time"])
    parser.add_argument("--variants", nargs="+", default=None)
    parser.add_argument("--cases", nargs="+", default=list(CHECKS), help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--jobs", type=int, default=6, help="processes that check side by side")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_SECONDS, help="seconds after which no unit starts"
    )
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    began = time.monotonic()
    results: dict[tuple[str, str, str], dict[str, Any]] = {}

    def run(unit: tuple[str, str, str], child: Child) -> None:
        if time.monotonic() - began < options.budget:
            results[unit] = child.run(unit, UNIT_SECONDS)
            show(unit, results[unit])

    if "check" in options.do:
        variants = [v for v in options.variants or DEFAULT_CHECK_VARIANTS if v != "fa3"]
        units = [("check", name, variant) for name in options.cases for variant in variants]
        children = [Child() for _ in range(options.jobs)]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(
                pool.map(
                    lambda i: [run(u, children[i]) for u in units[i :: options.jobs]],
                    range(options.jobs),
                )
            )
        for child in children:
            child.close()
        good = sum(bool(found.get("ok")) for found in results.values())
        print(f"checks: {good} of {len(units)} ok ({time.monotonic() - began:.0f} s)", flush=True)
    variants = options.variants or DEFAULT_TIME_VARIANTS
    if "time" in options.do:
        child = Child()
        for name in options.rows:
            for variant in variants if name != "matmul" else ["matmul"]:
                run(("time", name, variant), child)
        child.close()
        table(results, variants)
        ceiling = results.get(("time", "matmul", "matmul"), {}).get("tflops")
        print(
            f"matmul 8192: {ceiling and round(ceiling)} TFLOP/s; {time.monotonic() - began:.0f} s in all"
        )
    folder = Path(os.environ.get("OUT", "."))
    listed = [{"kind": k, "name": n, "variant": v, **found} for (k, n, v), found in results.items()]
    (folder / "prefill_probe.json").write_text(json.dumps(listed, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
