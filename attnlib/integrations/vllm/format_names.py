"""Names of caches with scales in the page (M16) as values of `--kv-cache-dtype`.

A name is that of a format, or those of the formats of keys and of values with a comma. A side may
be in the dtype of the model, which the name says. `+hadamard` rotates heads (P15). Open formats of
installed packages (P16) are named as in specs, `package:name`. vLLM 0.26 takes no other names than
its own; there `additional_config` names the rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.kv_dtype import KV_FORMAT_PAIRS, PAGE_FORMATS
from attnlib.kv_formats import installed_kv_formats

__all__ = ["is_page_name", "register_formats", "stored_fields", "takes_names"]

_ROTATED = "+hadamard"
_DTYPES = ("float16", "bfloat16", "float32")


def _names() -> Iterator[str]:
    for sides in (*PAGE_FORMATS, *KV_FORMAT_PAIRS):
        for dtype in _DTYPES[: 3 if "plain" in sides else 1]:
            name = sides.replace("plain", dtype)
            yield from (name, name + _ROTATED)


_PAGE_NAMES = tuple(_names())


def _open_names() -> Iterator[str]:
    """The names with an open format: alone, and on one side with each other format."""
    # vLLM finds a class by a path of names with dots between them.
    names = [one.name for one in installed_kv_formats() if "." not in one.name]
    for stored in names:
        sides = [stored, *(f"{stored},{other}" for other in names if other != stored)]
        for other in (*PAGE_FORMATS, *_DTYPES):
            sides += [f"{stored},{other}", f"{other},{stored}"]
        for name in sides:
            yield from (name, name + _ROTATED)


def is_page_name(name: str) -> bool:
    """Whether a value of `--kv-cache-dtype` names a cache with scales in the page."""
    return name in _PAGE_NAMES or (":" in name and name in _open_names())


def stored_fields(name: str, config: Any = None) -> dict[str, Any]:
    """The fields of an `AttentionSpec` that say how a cache stores heads.

    Args:
        name: value of `--kv-cache-dtype`, of the engine or of a layer.
        config: vLLM's, for the rotation of all layers with scales in the page.

    Raises:
        UnsupportedConfigError: `additional_config` names a rotation that cannot be served.
    """
    wanted = _rotation(config)
    if not is_page_name(name):
        return {"kv_cache_dtype": name}
    sides, _, rotation = name.partition("+")
    keys, _, values = sides.partition(",")
    return {
        "kv_cache_dtype": keys,
        "value_cache_dtype": values or None,
        "kv_rotation": rotation or wanted,
    }


def _rotation(config: Any) -> str | None:
    """The rotation that `additional_config` names."""
    more = getattr(config, "additional_config", None)
    given = dict(more.get("attnlib") or {}) if isinstance(more, dict) else {}
    rotation: str | None = given.pop("kv_rotation", None)
    stored = config.cache_config.cache_dtype if given or rotation else ""
    reason = None
    if given:
        reason = f"{', '.join(given)} is not known: kv_rotation is the only key"
    elif rotation and takes_names():
        reason = f"kv_rotation={rotation}: use --kv-cache-dtype FORMAT{_ROTATED}"
    elif rotation and not is_page_name(stored):
        reason = (
            f"kv_rotation={rotation} with --kv-cache-dtype {stored}: use int8_per_token_head, "
            "fp8_per_token_head or nvfp4"
        )
    elif rotation and getattr(config, "kv_transfer_config", None) is not None:
        reason = f"kv_rotation={rotation}: connectors do not compare it, use none"
    if reason:
        raise UnsupportedConfigError(f"additional_config['attnlib']: {reason}", reasons=[reason])
    return rotation


def takes_names() -> bool:
    """Whether vLLM takes names of formats from others (not 0.26)."""
    from vllm.config import cache

    return hasattr(cache, "register_kv_cache_dtype")


def register_formats() -> None:
    """Let `--kv-cache-dtype` take the names that vLLM does not know."""
    from vllm.config import cache

    if not takes_names():
        return
    for name in (*_PAGE_NAMES, *_open_names()):
        if not cache.is_known_kv_cache_dtype(name):
            stored = PAGE_FORMATS.get(name.removesuffix(_ROTATED))
            dtype = torch.uint8 if stored is None else stored.dtype
            cache.register_kv_cache_dtype(name)(_handler(name, dtype))


def _handler(name: str, dtype: torch.dtype) -> type:
    """What vLLM asks about a format that it does not know."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        def __init__(self) -> None:
            self.name = name

        def torch_dtype(self) -> torch.dtype:
            return dtype

        def quant_mode(self) -> Any:
            # This mode stands for any format with scales in the page: no scales are loaded. CUSTOM
            # is an alias of OCTAVE_K3V4 in vLLM 0.33, so that `is_octave` is true for it.
            return KVQuantMode.INT8_PER_TOKEN_HEAD

    return Handler
