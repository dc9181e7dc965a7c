"""Expanded prefill of multi-head latent attention (128 heads of 192 and 128) and FlashAttention 3.

    python benchmarks/gpu/expanded_prefill.py --lengths 8192 32768 --out expanded_prefill.json

One prompt, causal, bfloat16. Keys and values are expanded from the latents of each step, so nothing
needs them in pages: FlashAttention 3 reads packed ones in vLLM, and `LatentAttention` blocks of 128
tokens. Rows measure both kernels on both. The outputs of some rows and heads are compared with
float32 first. Then short bursts of all kernels alternate, because the chip reduces its clock under
this load: the first calls after a pause are up to a fifth faster. Times are medians of the bursts.
The clock is that of one multiprocessor, and the energy that of the whole board.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from attnlib.bench.provenance import provenance
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.paged_prefill import paged_prefill
from attnlib.ops.triton.varlen_prefill import varlen_prefill

HEADS, SIZE, SIZE_V, BLOCK = 128, 192, 128, 128
TOLERANCE = 2e-2
"""Largest difference from float32; values are standard normal and outputs are rounded once."""

Calls = dict[str, Callable[[], torch.Tensor]]


@triton.jit
def read_clock(result):
    """Store cycles, nanoseconds and the number of this multiprocessor."""
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    time = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(result, cycles)
    tl.store(result + 1, time)
    tl.store(result + 2, sm.to(tl.int64))


class Board:
    """Energy counter of the current GPU's board; 0 without NVML."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        try:
            self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
            return
        self._nvml.nvmlInit_v2()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)):
            self._nvml = None

    def millijoules(self) -> int:
        """Energy since the driver was loaded."""
        counter = ctypes.c_ulonglong()
        if self._nvml is not None:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(counter))
        return counter.value


class Prompt:
    """Inputs of one prompt, in blocks and packed, and the calls on them."""

    def __init__(self, length: int) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        blocks = length // BLOCK
        self.length = length
        self.query = torch.randn(length, HEADS, SIZE, **options)
        self.keys = torch.randn(blocks, BLOCK, HEADS, SIZE, **options)
        self.values = torch.randn(blocks, BLOCK, HEADS, SIZE_V, **options)
        self.table = torch.randperm(blocks, device="cuda").int().view(1, blocks)
        order = self.table[0].long()
        self.packed_keys = self.keys[order].flatten(0, 1)
        self.packed_values = self.values[order].flatten(0, 1)
        self.starts = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        self.lens = self.starts[1:].clone()
        self.out = torch.empty(length, HEADS, SIZE_V, **options)
        self.counters = torch.zeros(64, device="cuda", dtype=torch.int32)
        self.params = AttentionParams(scale=SIZE**-0.5)

    def in_blocks(self) -> torch.Tensor:
        """The kernel over blocks, which `LatentAttention` runs."""
        paged_prefill(
            self.query, self.keys, self.values, self.table, self.starts, self.lens, self.params,
            max_query_len=self.length, max_seq_len=self.length, out=self.out,
            counters=self.counters,
        )  # fmt: skip
        return self.out

    def without_blocks(self) -> torch.Tensor:
        """The kernel over packed keys and values."""
        varlen_prefill(
            self.query, self.packed_keys, self.packed_values, self.starts, self.starts,
            self.params, max_seqlen_q=self.length, max_seqlen_k=self.length, out=self.out,
        )  # fmt: skip
        return self.out

    def calls(self) -> Calls:
        """The kernels to measure; those of FlashAttention 3 only where it is installed."""
        calls: Calls = {"attnlib, blocks": self.in_blocks, "attnlib, packed": self.without_blocks}
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func
        except ImportError:
            return calls
        options = {
            "cu_seqlens_q": self.starts, "max_seqlen_q": self.length, "max_seqlen_k": self.length,
            "softmax_scale": self.params.scale, "causal": True, "fa_version": 3,
        }  # fmt: skip
        calls["FlashAttention 3, blocks"] = lambda: flash_attn_varlen_func(
            self.query, self.keys, self.values, seqused_k=self.lens, block_table=self.table,
            **options,
        )  # fmt: skip
        calls["FlashAttention 3, packed"] = lambda: flash_attn_varlen_func(
            self.query, self.packed_keys, self.packed_values, cu_seqlens_k=self.starts, **options
        )
        return calls

    def error(self, out: torch.Tensor) -> float:
        """Largest difference from float32 in three heads at three places."""
        worst = 0.0
        for head in (0, HEADS * 3 // 5, HEADS - 1):
            keys = self.packed_keys[:, head].float()
            values = self.packed_values[:, head].float()
            for first in (0, self.length // 2 - 37, self.length - 100):
                rows = torch.arange(first, first + 100, device="cuda")
                scores = self.query[rows, head].float() @ keys.T * self.params.scale
                hidden = torch.arange(self.length, device="cuda")[None] > rows[:, None]
                weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                difference = (weights @ values - out[rows, head].float()).abs().max()
                worst = max(worst, float(difference))
        return worst


def check(prompt: Prompt, calls: Calls) -> dict[str, float]:
    """Largest errors; every row of the output is written.

    Raises:
        ValueError: an output differs from float32 by more than TOLERANCE, or has NaN.
    """
    errors = {}
    for name, call in calls.items():
        prompt.out.fill_(float("nan"))
        out = call()
        errors[name] = prompt.error(out)
        if not errors[name] <= TOLERANCE or bool(out.isnan().any()):
            raise ValueError(f"{name}: error {errors[name]}, limit {TOLERANCE}, or NaN")
    return errors


def measure(calls: Calls, rounds: int, milliseconds: float) -> dict[str, dict[str, Any]]:
    """Measure bursts of about `milliseconds` in turn, every other round in reverse."""
    board, clocks = Board(), torch.zeros(2, 3, device="cuda", dtype=torch.int64)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            known = [time for time, _, _ in found[name]]
            count = max(1, round(milliseconds * 1e3 / known[0])) if known else 1
            energy = board.millijoules()
            read_clock[(1,)](clocks[0])
            begin.record()
            for _ in range(count):
                calls[name]()
            end.record()
            read_clock[(1,)](clocks[1])
            torch.cuda.synchronize()
            energy = board.millijoules() - energy
            (cycles, time, sm), (last_cycles, last_time, last_sm) = clocks.tolist()
            clock = (last_cycles - cycles) / (last_time - time) * 1e3 if sm == last_sm else 0.0
            found[name].append((begin.elapsed_time(end) * 1e3 / count, clock, energy / count))
    return {
        name: {
            "us": statistics.median(row[0] for row in rows[1:]),
            "bursts_us": [round(row[0], 1) for row in rows[1:]],
            "mhz": statistics.median(row[1] for row in rows[1:]),
            "millijoules": statistics.median(row[2] for row in rows[1:]),
        }
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=8, help="bursts of each kernel")
    parser.add_argument("--milliseconds", type=float, default=150, help="length of a burst")
    parser.add_argument("--commit", help="of the tree, where it has no .git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        prompt = Prompt(length)
        calls = prompt.calls()
        errors = check(prompt, calls)
        times = measure(calls, options.rounds, options.milliseconds)
        for name, found in times.items():
            rows.append({"length": length, "kernel": name, "error": errors[name], **found})
            print(
                f"{length:6} {name:26} {found['us']:9.1f} us {found['mhz']:5.0f} MHz "
                f"{found['millijoules']:8.0f} mJ  error {errors[name]:.4f}",
                flush=True,
            )
        del prompt, calls
        torch.cuda.empty_cache()
    if options.out:
        text = json.dumps({"provenance": provenance(commit=options.commit), "rows": rows}, indent=1)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
