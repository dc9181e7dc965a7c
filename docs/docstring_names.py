"""Griffe extension: splits docstring entries that describe several names.

attnlib documents related parameters together (`k_scale, v_scale: scales of the cache`). Griffe
reads such a line as one name with a type. The extension repeats the description for each name.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^( +)(\w+(?:, \w+)+):( .*\n?(?:\1 +\S.*\n?)*)", re.M)


class DocstringNames(griffe.Extension):
    """Rewrites the docstring of every object when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split_names(obj.docstring.value)


def split_names(text: str) -> str:
    """The docstring with one entry per name."""

    def replace(match: re.Match[str]) -> str:
        indent, names, description = match.groups()
        entry = description.rstrip("\n")
        return "\n".join(f"{indent}{name}:{entry}" for name in names.split(", ")) + "\n"

    return _ENTRY.sub(replace, text)
