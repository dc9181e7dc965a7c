"""What Triton's cache finds a compiled kernel by, in Triton 3.6 to 3.9.

The key of a kernel joins
1. Triton itself: version, and the contents of its compiler, backends, language and library;
2. the kernel: its source and that of every function that it calls, with their line numbers in
   their files, the types of its arguments, which integers and addresses are multiples of 16, and
   the values of its compile-time arguments;
3. the output of `ptxas --version` and the architecture;
4. options: warps, stages, and those that environment variables set (`PTXAS_OPTIONS`,
   `TRITON_DEFAULT_FP_FUSION`, `TRITON_OVERRIDE_ARCH`, ...), and the contents of libdevice;
5. the environment variables that Triton lists (`DISABLE_PTXAS_OPT`, `TRITON_ENABLE_ASAN`, ...).

No key of a kernel has a path, or depends on the process (`settle`). `key_facts` names what all
kernels of an installation share.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import threading
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

__all__ = ["folder_name", "kernel_key", "key_facts", "read_ahead"]

_LOCK = threading.Lock()
_READING: list[threading.Thread] = []


def read_ahead() -> None:
    """Begin to read Triton's library, 400 MB, whose contents all keys depend on: in a thread, once
    in a process. Triton keeps the result; `kernel_key` waits for it."""
    from triton.runtime.cache import triton_key

    with _LOCK:
        if not _READING:
            _READING.append(threading.Thread(target=triton_key, daemon=True))
            _READING[0].start()


def kernel_key(source: Any, backend: Any, options: Any) -> str:
    """The name of a kernel in Triton's cache: 64 hexadecimal digits.

    Args:
        source: Triton's `ASTSource`.
        backend: Triton's backend of the target.
        options: as `JITFunction._do_compile` gets them.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key

    for thread in tuple(_READING):
        thread.join()
    # `triton.compile` parses the options of a call again.
    parsed = backend.parse_options(dict(options.__dict__, **source.parse_options()))
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    if (hook := triton.knobs.runtime.add_stages_inspection_hook) is not None:
        key += hook()[0]
    return hashlib.sha256(key.encode()).hexdigest()


def folder_name(key: str) -> str:
    """The folder of a key below that of the cache."""
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def key_facts(target: GPUTarget) -> dict[str, str]:
    """What the keys of all of attnlib's kernels depend on, by name."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import triton_key

    backend: Any = make_backend(target)
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    given = {"debug": runtime.debug, "instrumentation_mode": compilation.instrumentation_mode}
    options = dict(vars(backend.parse_options(given)))
    libraries = {name: _digest_of_file(path) for name, path in options.pop("extern_libs")}
    return {
        "Triton": triton.__version__,
        "files of Triton": _digest(triton_key()),
        "kernel sources of attnlib": _digest_of_sources(),
        "ptxas and target": " ".join(backend.hash().split("\n")[-2:]),
        "ptxas --version": _digest(backend.hash()),
        **{f"library {name}": digest for name, digest in libraries.items()},
        **{f"option {name}": str(value) for name, value in sorted(options.items())},
        **{name: str(value) for name, value in get_cache_invalidating_env_vars().items()},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


@functools.cache
def _digest_of_sources() -> str:
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("kernels/*.py"))
    parts = [file.relative_to(root).as_posix() + file.read_text(encoding="utf-8") for file in files]
    return _digest("\0".join(parts))
