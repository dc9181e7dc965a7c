"""What the device can do at most, measured in the same run as everything that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from attnlib.bench.timer import EagerWatch, take_turns, wind_up

__all__ = ["Ceilings", "measure_ceilings"]


@dataclass(frozen=True)
class Ceilings:
    """Rates of simple operations.

    Attributes:
        copy_gbps: GB/s read and written by a device-to-device copy.
        read_gbps: GB/s read by a reduction.
        matmul_tflops: TFLOP/s of a square matrix product; matmul: what was multiplied.
    """

    copy_gbps: float
    read_gbps: float
    matmul_tflops: float
    matmul: str

    def to_json(self) -> dict[str, float | str]:
        """Field -> value."""
        return asdict(self)

    def __str__(self) -> str:
        return f"copy {self.copy_gbps:.0f} GB/s, read {self.read_gbps:.0f} GB/s, {self.matmul} {self.matmul_tflops:.3g} TFLOP/s"


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure on idle buffers far beyond the last cache: 2 GiB and bfloat16 8192^3 on a GPU, 64 MiB and float32 512^3 on a CPU."""
    on_gpu = device.type == "cuda"
    elements, side = (2**29, 8192) if on_gpu else (2**24, 512)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    copy_us, read_us = _memory_us(elements, device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    product_us = _us(lambda: torch.mm(left, right, out=product), device)
    return Ceilings(
        copy_gbps=2 * elements * 4 / copy_us / 1e3,
        read_gbps=elements * 4 / read_us / 1e3,
        matmul_tflops=2 * side**3 / product_us / 1e6,
        matmul=f"{str(dtype).removeprefix('torch.')} {side}^3 matrix product",
    )


def _memory_us(elements: int, device: torch.device) -> tuple[float, float]:
    """Microseconds to copy and to read so many float32; the faster of two reductions reads."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copied = _us(lambda: target.copy_(source), device)
    rows, total, sums = (
        source.view(-1, 2**12),
        torch.empty((), device=device),
        torch.empty(elements // 2**12, device=device),
    )
    whole = _us(lambda: torch.sum(source, dim=0, out=total), device)
    by_row = _us(lambda: torch.sum(rows, dim=1, out=sums), device)
    return copied, min(whole, by_row)


def _us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds per call; these take so long on a GPU that a launch does not count, so they need no graph."""
    expected = wind_up(lambda _: call(), device)
    watch = EagerWatch(lambda _: call(), 1, device, expected / 4)
    return take_turns({"it": watch}, {"it": expected})["it"].us
