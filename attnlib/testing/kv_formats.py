"""The KV format under test, by name or path, and its checks."""

from __future__ import annotations

from attnlib.errors import ContractError
from attnlib.kv_formats import KVFormat, find_kv_format, register_kv_format
from attnlib.object_path import is_absent, load_object
from attnlib.testing.checks.kv_format_caches import CACHE_CHECKS
from attnlib.testing.checks.kv_format_numbers import NUMBER_CHECKS

__all__ = ["KV_FORMAT_CHECKS", "load_kv_format"]

KV_FORMAT_CHECKS = (*NUMBER_CHECKS, *CACHE_CHECKS)
"""What `attnlib verify --kv-format` runs."""


def load_kv_format(text: str) -> KVFormat:
    """The format of a name, or at a path, which is registered.

    Args:
        text: a name, `module:OBJECT` or `path/to/file.py:OBJECT`.

    Raises:
        ContractError: neither a name nor the path of a `KVFormat`, or it cannot be imported.
        RegistrationError: another format has its name.
    """
    try:
        return find_kv_format(text)
    except ContractError as unknown:
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
    return register_kv_format(found) if found.is_open else found
