"""K2: one backend writes the cache, another one reads it.

The backend writes a cache that another backend attends to, and vice versa, for several layouts and
block sizes. Checks K3 and V2 test the backend's writes and reads separately with reference code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.outcome import NotRun
from attnlib.testing.runner import Backend, compare_with_oracle, write_then_attend

__all__ = ["CHECKS", "check_exchange"]

_BLOCKS = (8, 16, 32, 64, 128, 256, 544)
_LAYOUTS = ("NHD", "HND", "NHD_INTERLEAVED", "HND_INTERLEAVED", "NHD_PACKED")


def check_exchange(writer: Backend, reader: Backend, case: Case, target: BackendUnderTest) -> str:
    """Write with one backend and attend with another; "" if the result is within budget.

    Raises:
        UnsupportedCase: one of the two does not support the case; the reasons name it.
    """
    error = compare_with_oracle(
        case, write_then_attend(writer, reader, case, target.device), target.device
    )
    return f"{writer.get_name()} writes, {reader.get_name()} reads: {error}" if error else ""


def _cells(target: BackendUnderTest) -> Iterator[tuple[str, Case]]:
    base = target.base_case
    layouts = ("ALIASED",) if base.use_mla else _LAYOUTS  # latents have one memory (P10)
    for layout in layouts[:2] if target.quick else layouts:
        for block in (16,) if target.quick else _BLOCKS:
            if block in (16, 64) or layout == layouts[0]:
                batch = f"q5s{block + 7}_q1s{block}_q1s3"
                yield (
                    f"{layout}-{block}",
                    target.case(batch=batch, layout=layout, block_size=block, needs_lse=False),
                )
    yield (
        "fp8",
        target.case(
            batch="q5s23_q1s33",
            kv_cache_dtype="fp8_e4m3",
            k_scale=0.25,
            v_scale=0.25 if base.use_mla else 0.5,
            needs_lse=False,
        ),
    )


def _interop(target: BackendUnderTest) -> Iterator[CheckCase]:
    peers = [backend for backend in target.peers if backend is not target.backend]
    if not peers:
        yield CheckCase("pairs", partial(_nobody, target))
    for peer in peers:
        for name, case in _cells(target):
            for writer, reader in ((target.backend, peer), (peer, target.backend)):
                yield CheckCase(
                    f"{writer.get_name()}-to-{reader.get_name()}-{name}",
                    partial(check_exchange, writer, reader, case, target),
                    case,
                )


def _nobody(target: BackendUnderTest) -> str:
    raise NotRun(
        f"no second backend to exchange caches with on {target.device}; name one with --against"
    )


CHECKS = (Check("K2", "one backend writes the cache, another one reads it", _interop),)
