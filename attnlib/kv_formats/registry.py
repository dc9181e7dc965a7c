"""Open KV formats, by name: registered ones, and those of installed packages.

A package names its format in the entry-point group `attnlib.kv_formats`:

    [project.entry-points."attnlib.kv_formats"]
    rotated4 = "my_package:ROTATED_4BIT"

The format is named "package:rotated4", and is imported when a spec first names it.
"""

from __future__ import annotations

import copyreg
import threading
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from attnlib import env
from attnlib.errors import ContractError, RegistrationError
from attnlib.kv_formats.builtin import PAGE_FORMATS
from attnlib.kv_formats.declaration import KVFormat, plain_format
from attnlib.object_path import is_absent, load_object

__all__ = [
    "ENTRY_POINT_GROUP",
    "find_kv_format",
    "installed_kv_formats",
    "load_kv_format",
    "load_kv_formats",
    "register_kv_format",
    "unregister_kv_format",
]

ENTRY_POINT_GROUP = "attnlib.kv_formats"

_lock = threading.RLock()
_formats: dict[str, KVFormat] = dict(PAGE_FORMATS)


def register_kv_format(stored: KVFormat) -> KVFormat:
    """Make a format available by its name.

    Returns:
        The format, so that a module can register what it defines.

    Raises:
        RegistrationError: no `KVFormat`, a name without a package, or the name of another format.
    """
    if not isinstance(stored, KVFormat):
        raise RegistrationError(
            f"{stored!r} is not a KV format: make an attnlib.kv_formats.KVFormat"
        )
    if not stored.is_open:
        raise RegistrationError(
            f"KV format {stored.name!r} needs a name of the form package:name; other names are "
            "those of the library"
        )
    with _lock:
        known = _formats.setdefault(stored.name, stored)
    if known is not stored:
        raise RegistrationError(
            f"a KV format {stored.name!r} (version {known.version}) is already registered: choose "
            "another name, or unregister_kv_format it first"
        )
    return stored


def unregister_kv_format(name: str) -> None:
    """Forget an open format. Caches and specs that name it cannot be used any more.

    Raises:
        RegistrationError: no open format has this name.
    """
    with _lock:
        if name in PAGE_FORMATS or _formats.pop(name, None) is None:
            raise RegistrationError(f"no open KV format {name!r} is registered")


def find_kv_format(name: str, version: int | None = None) -> KVFormat:
    """The format with scales in the page of a name.

    Args:
        name: one of `PAGE_FORMATS`, or "package:name".
        version: of stored bytes; None for any.

    Raises:
        ContractError: no format has this name, its package cannot be imported, or it has another
            version.
    """
    found = _formats.get(name) or _find_installed(name)
    if version is not None and found.version != version:
        raise ContractError(
            f"stored bytes are of version {version} of {name}, and the installed format has "
            f"version {found.version}: install the package of that version, or write them again",
            rule="P16",
        )
    return found


def load_kv_format(text: str) -> KVFormat:
    """The format of a name, or at a path, which is registered.

    Args:
        text: a name, `module:OBJECT` or `path/to/file.py:OBJECT`.

    Raises:
        ContractError: neither a name nor the path of a `KVFormat`, or it cannot be imported.
        RegistrationError: another format has its name, or it is a name of the library.
    """
    try:
        return find_kv_format(text)
    except ContractError as unknown:
        if ":" not in text:
            raise  # a name of the library, not a path
        try:
            found = load_object(text)
        except ContractError:
            raise
        except Exception as error:  # whatever a module raises
            if is_absent(text, error):
                raise unknown from None
            raise ContractError(
                f"{text} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(found, KVFormat):
        raise ContractError(f"{text} is {found!r}: give the path of a KVFormat", rule="P16")
    return register_kv_format(found)


def installed_kv_formats() -> list[KVFormat]:
    """All open formats, by name. Warns if one of an installed package cannot be used."""
    formats, failures = load_kv_formats()
    for failure in failures:
        warnings.warn(failure, stacklevel=2)
    return formats


def load_kv_formats() -> tuple[list[KVFormat], list[str]]:
    """All open formats, by name, and why others of installed packages cannot be used."""
    failures = []
    for point in _entry_points():
        try:
            _load(point)
        except (ContractError, RegistrationError) as error:
            failures.append(str(error))
    found = (one for one in _formats.values() if one.is_open)
    return sorted(found, key=lambda one: one.name), failures


def _find_installed(name: str) -> KVFormat:
    short = name.partition(":")[2]
    points = [point for point in _entry_points() if short and point.name == short]
    failed: Exception | None = None
    for point in points:
        try:
            if (found := _load(point)).name == name:
                return found
        except (ContractError, RegistrationError) as error:  # another package may have the format
            failed = failed or error
    if failed is not None:
        raise failed
    names = ", ".join(_formats)
    known = sorted({f"{point.name} = {point.value}" for point in _entry_points()})
    raise ContractError(
        f"no KV format is named {name!r}; the formats are {names}, and the entry points of "
        f"{ENTRY_POINT_GROUP} are {', '.join(known) or 'none'}: install its package, or call "
        "register_kv_format",
        rule="P16",
    )


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP)) if env.read("ATTNLIB_PLUGINS") else []


def _load(point: EntryPoint) -> KVFormat:
    """The format of an entry point, registered.

    Raises:
        ContractError: it cannot be imported.
        RegistrationError: it is not an open format.
    """
    try:
        found = point.load()
    except Exception as error:  # whatever a package raises
        raise ContractError(
            f"KV format {point.name} = {point.value} cannot be imported: {type(error).__name__}: "
            f"{error}",
            rule="P16",
        ) from error
    return register_kv_format(found)


def _pickled(stored: KVFormat) -> tuple[Any, ...]:
    """Pickled by name and version: the functions stay with the package of the format."""
    if stored.scale_dtype is None:
        return plain_format, (stored.dtype,)
    return find_kv_format, (stored.name, stored.version)


copyreg.pickle(KVFormat, _pickled)
