"""What decodes of state layers wait for before their copies to shared memory are under way.

`python -m tests.ops.triton.hopper.state_copies CASE...` prints one JSON line per case. It needs a
process that does not interpret Triton.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.kernel_sass import compile_to_sass
from tests.ops.triton.cross_compile import compile_for
from tests.ops.triton.hopper.emulate import print_cases

__all__ = ["CASES", "early_waits", "waits_first"]

CASES = (
    "state-128-copied", "state-128-few-copied", "state-128-channels-copied", "state-64-copied",
    "state-mamba2-copied", "state-128-copied-drafts", "fused-128-copied",
    "fused-128-channels-copied", "fused-mamba2-copied", "fused-128-channels-copied-drafts",
)  # fmt: skip
_INSTRUCTION = re.compile(r"^/\*[0-9a-f]{4,}\*/ (?:@!?U?P\d+ )?(\w+)", re.MULTILINE)
_WAITS = {"SHFL", "MUFU", "FADD", "FFMA", "FMUL", "DEPBAR"}
"""Instructions that tokens are computed with: they wait for loads."""


def early_waits(text: str) -> list[str]:
    """Instructions that wait between the loads of new tokens and the end of the copies of a kernel,
    the first one of a text of SASS."""
    names = _INSTRUCTION.findall(text)
    ends = [place for place, name in enumerate(names) if name == "LDGDEPBAR"][:2]
    assert len(ends) == 2, "a tail and a state are copied"
    first = names.index("LDGSTS")
    loads = len(names[:first]) - names[:first][::-1].index("BAR")
    assert "LDG" in names[:loads], "the loads of new tokens are not in front of the copies"
    return [name for name in names[loads : ends[1]] if name in _WAITS]


def waits_first(text: str) -> bool:
    """Whether a kernel waits for the one before, whose end it overlaps, before it reads memory."""
    names = _INSTRUCTION.findall(text)
    return names.index("ACQBULK") < names.index("LDG")


def describe(case: str) -> dict[str, Any]:
    """The waits of the decode of a case."""
    text = compile_to_sass(lambda: compile_for("sm_90", [case]))
    return {"early": early_waits(text), "waits first": waits_first(text)}


if __name__ == "__main__":
    print_cases(CASES, describe)
