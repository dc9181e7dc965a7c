"""The table of rows: what a seed names, where attnlib has it, and whether it is the same."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tests.compat.seeds.comparison import difference

__all__ = ["Claim", "Probe", "Row", "Seed"]

Probe = Callable[[Any], Any]
"""A function of a module, the original or attnlib's; its result is compared."""


class Claim(NamedTuple):
    """What a row says about attnlib.

    Attributes:
        kind: "same", "other name" or "differs".
        text: the other name, or the reason of the difference.
    """

    kind: str = "same"
    text: str = ""


class Row(NamedTuple):
    """One row.

    Attributes:
        number: seed and row, as in "3.07".
        document: name of the seed document, without ".txt".
        name: what the document names, in Markdown.
        module: the module of attnlib that has it.
        claim: whether it is the same.
        note: further words for the page.
        probe: runs on the original and on `module`.
        original: the seed in plain torch.
        ours: gives the result of attnlib where its module has nothing that the probe could call.
    """

    number: str
    document: str
    name: str
    module: str
    claim: Claim
    note: str
    probe: Probe
    original: ModuleType
    ours: Callable[[], Any] | None = None

    @property
    def import_line(self) -> str:
        """How a program gets `module`."""
        package, _, name = self.module.rpartition(".")
        return f"from {package} import {name}"

    @property
    def reference(self) -> str:
        """The test that runs the probe on both."""
        return f"tests/compat/seeds/test_rows.py::test_row[{self.number}]"

    def difference(self, module: Any = None) -> str | None:
        """What differs from the original; None if nothing does.

        Args:
            module: runs instead of attnlib's.
        """
        torch.manual_seed(0)
        wanted = self.probe(self.original)
        torch.manual_seed(0)
        try:
            if module is not None:
                got = self.probe(module)
            elif self.ours is not None:
                got = self.ours()
            else:
                got = self.probe(import_module(self.module))
        except Exception as error:  # a program of the seed would stop here
            return f"raises {type(error).__name__}: {error}"
        return difference(got, wanted)


class Seed:
    """The rows of one document, in the order of their definition.

    Args:
        number: of the seed.
        document: name of the document, without ".txt".
        module: the module of attnlib that rows have unless they name another.
        original: the seed in plain torch.
    """

    def __init__(self, number: int, document: str, module: str, original: ModuleType) -> None:
        self.number, self.document, self.module = number, document, module
        self.original = original
        self.rows: list[Row] = []

    def row(
        self,
        name: str,
        *,
        module: str | None = None,
        other_name: str = "",
        differs: str = "",
        note: str = "",
        ours: Callable[[], Any] | None = None,
    ) -> Callable[[Probe], Probe]:
        """Add a row whose probe is the decorated function; the arguments are those of `Row`."""
        claim = Claim()
        if other_name or differs:
            claim = Claim("differs" if differs else "other name", differs or other_name)

        def add(probe: Probe) -> Probe:
            number = f"{self.number}.{len(self.rows) + 1:02}"
            self.rows.append(
                Row(number, self.document, name, module or self.module, claim, note, probe,
                    self.original, ours)
            )  # fmt: skip
            return probe

        return add
