"""Runs the steps of a warm-up: every kernel that one of them needs is compiled and launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from attnlib.ops.dispatch import has_triton, runs_kernels

__all__ = ["first_uses", "run_steps"]


def run_steps(
    steps: Sequence[Callable[[], None]], device: torch.device, facts: str | None = None
) -> None:
    """Run steps of which many need the same kernels.

    On a GPU all are surveyed first, while threads compile new kernels. Then those run that were the
    first to need a kernel. With `facts`, later processes survey and run only these. For a described
    GPU all run, and are noted for the processes of its machine.

    Args:
        steps: may be run several times, and leave nothing behind that a later one needs.
        device: where all kernels run.
        facts: what decides the kernels of each step, besides attnlib, Triton, torch and environment
            variables; None if it is not known.
    """
    if not (runs_kernels(device) and has_triton()):
        _run(steps)
        return
    from attnlib.ops.triton.launch.described import observed_launches
    from attnlib.ops.triton.launch.kernel_folder import use_kernel_folder
    from attnlib.ops.triton.launch.notes import read_note, write_note
    from attnlib.ops.triton.launch.survey import can_survey, survey_launches

    if (launches := observed_launches()) is not None:
        needed = [launches.of(step) for step in steps]
        if facts is not None:
            write_note(facts, first_uses(needed))
        return
    if not can_survey(device):
        _run(steps)
        return
    use_kernel_folder()  # which may have the note
    noted = None if facts is None else read_note(facts, len(steps))
    chosen = range(len(steps)) if noted is None else noted
    used = []
    with survey_launches() as survey:
        for number in chosen:
            steps[number]()
            if survey is not None:
                used.append(survey.take())
    if survey is None:  # another thread surveys
        return
    first = [chosen[number] for number in first_uses(used)]
    if survey.new:
        _run(steps[number] for number in first)
    if facts is not None and noted is None:
        write_note(facts, first)


def first_uses(used: Iterable[frozenset[object]]) -> list[int]:
    """The numbers of the sets with an element that no earlier set has."""
    known: set[object] = set()
    found = []
    for number, kernels in enumerate(used):
        if not kernels <= known:
            found.append(number)
            known |= kernels
    return found


def _run(steps: Iterable[Callable[[], None]]) -> None:
    for step in steps:
        step()
