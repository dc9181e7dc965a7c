"""Kernels of state layers beside those of other packages, all of them in CUDA graphs.

    python -m benchmarks.gpu.state_peers --out state_peers.json --limit-seconds 120

`attnlib bench --suite states` times whole calls of the adapters, which read slots on the host and
copy states. Here the functions of flash-linear-attention and FlashInfer get states and tokens as
they take them, so that their times are those of their kernels alone: they copy no state from or to
a slot, and keep none that a verification could return to. FlashInfer has a kernel for prompts of
gated delta nets and one for decodes of Mamba2 (with the gates inside).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnlib.backends.triton import TritonBackend
from attnlib.bench.backends import BenchBackend
from attnlib.bench.peaks import Peaks, measure_peaks
from attnlib.bench.state_case import StateCase
from attnlib.bench.state_cases import STATES
from attnlib.bench.state_runner import StateRunner
from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from benchmarks.gpu import rows

DEVICE = torch.device("cuda")
MOST_BYTES = 512 << 20
"""Of the states of all copies of a peer, which need not stay in the L2 cache between calls."""
FLA = {"qwen3-next": "gated_delta_rule", "kimi-linear": "kda", "nemotron-h": "simple_gla"}
Calls = list[Callable[[], Any]]


def draw(case: StateCase) -> dict[str, Tensor]:
    """Tokens `[N, T, ...]` and states `[N, Hv, Dv, Dk]` of a case."""
    spec, count, tokens = case.spec, case.num_reqs, case.query_len
    shapes = spec.input_shapes(count * tokens)
    made = {
        name: torch.randn(shapes[name], device=DEVICE).view(count, tokens, *shapes[name][1:])
        for name in ("query", "key", "value", "log_decay", "beta")
    }
    made = {
        name: x if name in ("log_decay", "beta") else x.to(spec.dtype) for name, x in made.items()
    }
    made["log_decay"] = -made["log_decay"].abs() / 8
    made["beta"] = made["beta"].sigmoid()
    return made


def states(case: StateCase) -> list[Tensor | None]:
    """The states of each copy; None before the first token."""
    if not case.context:
        return [None]
    spec = case.spec
    shape = (case.num_reqs, spec.num_heads, spec.value_size, spec.key_size)
    size = 4 * shape[0] * shape[1] * shape[2] * shape[3]
    copies = max(1, min(16, MOST_BYTES // size))
    return [torch.randn(shape, device=DEVICE) for _ in range(copies)]


def fla_calls(case: StateCase) -> Calls:
    """Calls of flash-linear-attention."""
    spec, name = case.spec, FLA[case.model]
    kind = "chunk" if case.work == "prefill" else "fused_recurrent"
    function = getattr(import_module(f"fla.ops.{name}"), f"{kind}_{name}")
    given = draw(case)
    query, key, value, beta = (given[each] for each in ("query", "key", "value", "beta"))
    more: dict[str, Any] = {"beta": beta, "use_qk_l2norm_in_kernel": True}
    if spec.update == "add":
        query, key = (x.repeat_interleave(spec.group_size, 2) for x in (query, key))
        more = {}
    arguments = {"q": query, "k": key, "v": value, "g": given["log_decay"], **more}
    arguments |= {"scale": spec.key_size**-0.5, "output_final_state": True, "state_v_first": True}
    return [partial(function, **arguments, initial_state=state) for state in states(case)]


def flashinfer_calls(case: StateCase) -> Calls:
    """Calls of FlashInfer, for what it has a kernel."""
    spec, given = case.spec, draw(case)
    tokens = case.num_reqs * case.query_len
    if case.model == "qwen3-next" and case.work == "prefill":
        chunked = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
        flat = {name: x.flatten(0, 1) for name, x in given.items()}
        norm = {n: torch.nn.functional.normalize(flat[n].float(), dim=-1) for n in ("query", "key")}
        starts = torch.arange(0, tokens + 1, case.query_len, device=DEVICE)
        shape = (case.num_reqs, spec.num_heads, spec.value_size, spec.key_size)
        initial = torch.zeros(shape, device=DEVICE)
        arguments = {
            "q": norm["query"].to(spec.dtype), "k": norm["key"].to(spec.dtype), "v": flat["value"],
            "g": flat["log_decay"].exp(), "beta": flat["beta"], "scale": spec.key_size**-0.5,
            "initial_state": initial, "output_final_state": True, "cu_seqlens": starts,
            "output": torch.empty_like(flat["value"]), "output_state": torch.empty_like(initial),
        }  # fmt: skip
        return [partial(chunked, **arguments)]
    if case.model == "nemotron-h" and case.work == "decode" and case.query_len == 1:
        update = import_module("flashinfer.mamba").selective_state_update
        x, b, c = (given[name][:, 0] for name in ("value", "key", "query"))
        heads, size = spec.num_heads, spec.value_size
        decay, step, skip, bias = torch.randn(4, heads, device=DEVICE)
        columns = (-1, size)
        arguments = {
            "x": x, "B": b, "C": c, "out": torch.empty_like(x), "dt_softplus": True,
            "A": -decay.exp()[:, None, None].expand(-1, size, spec.key_size),
            "dt": step.to(x.dtype).repeat(case.num_reqs, 1)[:, :, None].expand(-1, *columns),
            "D": skip.to(x.dtype)[:, None].expand(columns),
            "dt_bias": bias.to(x.dtype)[:, None].expand(columns),
            "state_batch_indices": torch.arange(case.num_reqs, dtype=torch.int32, device=DEVICE),
        }  # fmt: skip
        return [partial(update, state, **arguments) for state in states(case)]
    raise LookupError("no kernel for this row")


PEERS = {"fla": fla_calls, "flashinfer": flashinfer_calls}
CASES = {
    case.name: case
    for case in STATES
    if case.work in ("decode", "prefill") and not (case.work == "decode" and case.query_len > 1)
} | {case.name: case for case in STATES if case.work == "verify"}


def _call(found: Calls, copy: int) -> object:
    return found[copy]()


@torch.inference_mode()
def measure(peaks: Peaks | None, name: str) -> dict[str, Any]:
    """Times of the `triton` backend and of the kernels of its peers, and their ratio; without peak
    rates, only the first calls."""
    case = CASES[name]
    runner = StateRunner(case, BenchBackend("triton", TritonBackend), DEVICE)
    runner.first_calls()
    calls: dict[str, tuple[Callable[[int], object], int]] = {
        "triton": (runner.attend, runner.copies)
    }
    left_out = {}
    same = StateCase(model=case.model, work="decode", num_reqs=case.num_reqs, query_len=4)
    for peer, find in PEERS.items():
        if case.batch_invariant and peer == "flashinfer":
            continue
        try:
            found = find(same if case.work == "verify" else case)
            found[0]()
            torch.cuda.synchronize()
        except Exception as error:  # absent, or without a kernel for this row
            left_out[peer] = f"{type(error).__name__}: {error}"[:200]
            continue
        calls[peer] = (partial(_call, found), len(found))
    result: dict[str, Any] = {"left_out": left_out}
    if peaks is None:
        return result
    timers, expected = {}, {}
    for label, (call, copies) in calls.items():
        try:
            expected[label] = warm_up(call, DEVICE)
            timers[label] = GraphTimer(call, copies, DEVICE, expected[label])
        except Exception as error:  # cannot be captured
            left_out[label] = f"{type(error).__name__}: {error}"[:200]
    times = {k: found.us for k, found in measure_in_turn(timers, expected).items()}
    moved = runner.bytes_per_call / peaks.copy_gbps / 1e3
    ours = times.get("triton", float("nan"))
    best = min((us for label, us in times.items() if label != "triton"), default=None)
    result |= {"us": times, "bytes_us": moved, "share": moved / ours}
    result |= {"ratio": ours / best if best else None}
    peers = "  ".join(f"{k} {us:.1f}" for k, us in times.items() if k != "triton") or "no peer"
    ratio = f"ratio {ours / best:.3f}" if best else ""
    print(f"{name:44} {ours:9.1f} us  {moved / ours:6.1%}  {peers}  {ratio}", flush=True)
    return result


def main() -> int:
    parser = rows.parser(__doc__)
    parser.add_argument(
        "--warm", type=int, default=0, metavar="N", help="compile in N processes, and time nothing"
    )
    options = parser.parse_args()
    peaks = None if options.warm or options.list else measure_peaks(DEVICE)
    return rows.run(options, CASES, partial(measure, peaks), max(1, options.warm))


if __name__ == "__main__":
    sys.exit(main())
