"""The manifest of a folder of compiled kernels: one entry for each run of `attnlib compile`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

from attnlib.errors import ContractError
from attnlib.fields import check_types
from attnlib.ops.triton.launch.described import NeededKernel
from attnlib.ops.triton.launch.keys import key_facts

__all__ = ["MANIFEST", "Entry", "Manifest"]

MANIFEST = "attnlib-kernels.json"
_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """Kernels that were compiled together.

    Attributes:
        device: the GPU, as text.
        target: what Triton compiles for, such as "cuda:90".
        chip: numbers of the GPU, by name.
        limits: the largest batch, by name.
        specs: kind of layer -> its spec, as text.
        facts: what the keys of all kernels depend on (`key_facts`).
        kernels: name and key of each kernel.
    """

    device: str
    target: str
    chip: dict[str, int]
    limits: dict[str, int]
    specs: dict[str, str]
    facts: dict[str, str]
    kernels: list[Any]

    def needed(self) -> list[NeededKernel]:
        """The kernels."""
        return [NeededKernel(name, key) for name, key in self.kernels]

    def differences(self, target: GPUTarget) -> list[str]:
        """Facts of this process that differ. With any but the sources of attnlib no key is equal;
        with other sources, those of kernels that did not change are."""
        here = key_facts(target)
        return [
            f"{name}: {self.facts.get(name) or 'none'} in the folder, {here.get(name) or 'none'} "
            "here"
            for name in {**self.facts, **here}
            if self.facts.get(name) != here.get(name)
        ]


@dataclass(frozen=True)
class Manifest:
    """What the kernels of a folder were made for.

    Attributes:
        entries: in the order of the runs.
    """

    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ContractError: there is none, or it does not parse.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ContractError(
                f"{folder} is not a folder of kernels ({error}): make one with attnlib compile "
                f"--out {folder}"
            ) from None
        names = set(Entry.__dataclass_fields__)
        entries = data.get("entries") if isinstance(data, dict) else None
        if (
            not isinstance(entries, list)
            or data.get("version") != _VERSION
            or not all(isinstance(entry, dict) and set(entry) == names for entry in entries)
        ):
            raise ContractError(
                f"{path} was written by another version of attnlib: remove {folder} and run "
                "attnlib compile again"
            )
        for entry in entries:
            check_types(Entry, entry, str(path))
        return cls(tuple(Entry(**entry) for entry in entries))

    def add(self, entry: Entry) -> Manifest:
        """With one more entry, in place of one for the same GPU, limits and specs."""

        def purpose(one: Entry) -> tuple[Any, ...]:
            return one.device, one.chip, one.limits, one.specs

        kept = [one for one in self.entries if purpose(one) != purpose(entry)]
        return Manifest((*kept, entry))

    def write(self, folder: Path) -> None:
        """Write it to a folder."""
        data = {"version": _VERSION, "entries": [asdict(entry) for entry in self.entries]}
        (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def entries_for(self, target: GPUTarget) -> list[Entry]:
        """The entries for a GPU."""
        name = f"{target.backend}:{target.arch}"
        return [entry for entry in self.entries if entry.target == name]

    def differences(self, target: GPUTarget) -> list[str]:
        """Why no kernel for a GPU has the key that this process looks for; empty if some have."""
        entries = self.entries_for(target)
        if not entries:
            there = sorted({entry.target for entry in self.entries})
            others = ", ".join(there) or "no GPU: attnlib compile did not end"
            return [f"no kernels for {target.backend}:{target.arch}, only for {others}"]
        found = [entry.differences(target) for entry in entries]
        return [] if not all(found) else found[-1]
