"""Surveys of launches beside other threads, with a driver that launches nothing.

    TRITON_CACHE_DIR=FOLDER python -m tests.surveyed_threads

The last line is a JSON object: which threads launched a kernel during a survey and after it,
what a second survey at the same time is, whether Triton's methods are back, and what was in the
place of kernels when they came back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from attnlib.ops.triton.launch.bound import launches_observed
from attnlib.ops.triton.launch.survey import Survey, survey_launches
from tests.described_server import Driver

LAUNCHED: list[str] = []


class RecordingDriver(Driver):
    """Notes which thread launches."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: LAUNCHED.append(threading.current_thread().name)


@triton.jit
def one_kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 1.0)


def main() -> None:
    """Launch in two threads during a survey, then survey in two threads that overlap."""
    triton.runtime.driver.set_active(RecordingDriver())
    x, own_run, own_finish = torch.zeros(64), JITFunction.run, Survey.finish
    left: list[str] = []

    def finish(survey: Survey, is_complete: bool) -> None:
        if JITFunction.run is own_run:
            left.extend(type(new.kernels.get(new.key)).__name__ for new in survey.new)
        own_finish(survey, is_complete)

    Survey.finish = finish  # type: ignore[method-assign]
    one_kernel[(1,)](x, SIZE=8)
    before = len(LAUNCHED)
    with survey_launches() as survey:
        assert survey is not None
        one_kernel[(1,)](x, SIZE=8)  # is not new, and may read what a new kernel writes
        num_known = len(survey.take())
        one_kernel[(1,)](x, SIZE=16)
        _in_thread(lambda: one_kernel[(1,)](x, SIZE=16))
        _in_thread(lambda: one_kernel[(1,)](x, SIZE=32))
        num_new = len(survey.new)
    during = LAUNCHED[before:]
    one_kernel[(1,)](x, SIZE=16)

    first_began, second_began, first_ended = (threading.Event() for _ in range(3))
    second: list[Any] = []

    def survey_first() -> None:
        with survey_launches():
            first_began.set()
            second_began.wait(60)
        first_ended.set()

    def survey_second() -> None:
        first_began.wait(60)
        with survey_launches() as survey:
            second.append(None if survey is None else "a survey")
            second_began.set()
            first_ended.wait(60)

    threads = [threading.Thread(target=each) for each in (survey_first, survey_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with survey_launches() as survey:
        is_free = survey is not None
    print(
        json.dumps(
            {
                "known": num_known,
                "new": num_new,
                "during": during,
                "after": LAUNCHED[before + len(during) :],
                "second": second,
                "is_free": is_free,
                "is_restored": JITFunction.run is own_run and not launches_observed(),
                "left": left,
            }
        )
    )


def _in_thread(launch: Callable[[], Any]) -> None:
    thread = threading.Thread(target=launch, name="other")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
