"""K2: A writes, B reads.

The backend writes a cache that another one attends to, and the other way round, for layouts and block sizes; the kit's
own reading and writing stand between them in K3 and V2, so a failure here names the pair. Cells that one of the two
refuses must be refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.outcome import NotRun
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import Backend, exchange, judge

__all__ = ["PROBES", "write_then_read"]

_BLOCKS = (8, 16, 32, 64, 128, 256, 544)
_LAYOUTS = ("NHD", "HND", "NHD_INTERLEAVED", "HND_INTERLEAVED", "NHD_PACKED")


def write_then_read(writer: Backend, reader: Backend, case: Case, subject: Subject) -> str:
    """One backend writes this step's keys, the other attends; "" when the result is within budget.

    Raises:
        Refused: one of the two refuses the case; the reasons say which.
    """
    wrong = judge(case, exchange(writer, reader, case, subject.device), subject.device)
    return f"{writer.get_name()} writes, {reader.get_name()} reads: {wrong}" if wrong else ""


def _cells(subject: Subject) -> Iterator[tuple[str, Case]]:
    for layout in _LAYOUTS[:2] if subject.quick else _LAYOUTS:
        for block in (16,) if subject.quick else _BLOCKS:
            if block in (16, 64) or layout == "NHD":
                batch = f"q5s{block + 7}_q1s{block}_q1s3"
                yield (
                    f"{layout}-{block}",
                    subject.case(batch=batch, layout=layout, block_size=block, needs_lse=False),
                )
    yield (
        "fp8",
        subject.case(
            batch="q5s23_q1s33",
            kv_cache_dtype="fp8_e4m3",
            k_scale=0.25,
            v_scale=0.5,
            needs_lse=False,
        ),
    )


def _interop(subject: Subject) -> Iterator[Check]:
    others = [backend for backend in subject.others if backend is not subject.backend]
    if not others:
        yield Check("pairs", lambda: _nobody(subject))
    for other in others:
        for name, case in _cells(subject):
            for writer, reader in ((subject.backend, other), (other, subject.backend)):
                yield Check(
                    f"{writer.get_name()}-to-{reader.get_name()}-{name}",
                    lambda writer=writer, reader=reader, case=case: write_then_read(  # type: ignore[misc]
                        writer, reader, case, subject
                    ),
                    case,
                )


def _nobody(subject: Subject) -> str:
    raise NotRun(
        f"no second backend to exchange caches with on {subject.device}; name one with --against"
    )


PROBES = (Probe("K2", "one backend writes, another reads", _interop),)
