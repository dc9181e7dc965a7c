"""Record the signatures of the packages that the adapters call, from their real archives.

    python tests/backends/record_signatures.py [DIR]

renews signatures.json: for each release and function the names, kinds and defaults of its
parameters. The archives are downloaded to DIR (a temporary folder without it; those that are there
are used again) and read as text: nothing is installed, imported or copied. A wheel of vLLM has
300 MB. The fakes take their signatures from the file (`real_signatures.py`).

flash-attn has no wheels on the index. pip runs the setup.py of its source archive to read its
version, which needs torch in the environment.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")

Parameter = tuple[str, str, str | None]
"""Name, kind as in `inspect.Parameter`, and the source text of the default (None: required)."""


@dataclass(frozen=True)
class Release:
    """A release, and where its archive defines functions and methods ("Class.method")."""

    name: str
    version: str
    functions: dict[str, tuple[str, ...]]
    has_wheel: bool = True

    @property
    def stem(self) -> str:
        """The name of its archive without the suffix or the tags of a wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}"


_METHODS = ("__init__", "plan", "run")
_DECODE_PLAN = "BatchDecodeWithPagedKVCacheWrapper._plan_impl"  # 0.6.15; its `plan` takes **kwargs
_MLA = tuple(f"BatchMLAPagedAttentionWrapper.{method}" for method in _METHODS)
_PAGED = {
    f"flashinfer/{kind}.py": tuple(
        f"Batch{kind.title()}WithPagedKVCacheWrapper.{method}" for method in _METHODS
    )
    for kind in ("decode", "prefill")
}
_PLANNED = {**_PAGED, "flashinfer/decode.py": (*_PAGED["flashinfer/decode.py"], _DECODE_PLAN)}
_GDN = {"flashinfer/gdn_prefill.py": ("chunk_gated_delta_rule",)}
_FLAT_MLA = {"flashinfer/mla/_core.py": _MLA}
_STRUCTURED_MLA = {
    "flashinfer/mla/_batch_mla/_wrapper.py": _MLA,
    "flashinfer/mla/_batch_mla/_contracts.py": ("MLAPlanMetadata.csr",),
}
_VLLM = {
    "vllm/vllm_flash_attn/flash_attn_interface.py": (
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
    )
}
_FLA = {
    f"fla/ops/{module}/{form}.py": (f"{form}_{module}",)
    for module in ("gated_delta_rule", "kda", "simple_gla", "gla")
    for form in ("chunk", "fused_recurrent")
}
RELEASES = (
    Release(
        "flash-attn",
        "2.8.3",
        {
            "flash_attn/flash_attn_interface.py": ("flash_attn_varlen_func",),
            "hopper/flash_attn_interface.py": (
                "flash_attn_with_kvcache",
                "get_scheduler_metadata",
            ),
        },
        has_wheel=False,
    ),
    Release(
        "flash-attn-4", "4.0.0b36", {"flash_attn/cute/interface.py": ("flash_attn_varlen_func",)}
    ),
    *(Release("vllm", version, _VLLM) for version in ("0.24.0", "0.27.0", "0.33.0")),
    Release("flashinfer-python", "0.6.12", {**_PAGED, **_FLAT_MLA, **_GDN}),
    Release("flashinfer-python", "0.6.18", {**_PLANNED, **_FLAT_MLA, **_GDN}),
    Release("flashinfer-python", "0.7.0", {**_PLANNED, **_STRUCTURED_MLA, **_GDN}),
    Release("flashinfer-python", "0.7.2", {**_PLANNED, **_STRUCTURED_MLA, **_GDN}),
    Release("fla-core", "0.6.0", _FLA),
)
"""The first and last release that the adapters support, and those between them that changed a
signature in more than arguments at its end."""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        recorded = {
            f"{release.name} {release.version}": record(release, archive_of(release, folder))
            for release in RELEASES
        }
    FILE.write_text(_text(recorded))
    print(f"wrote {FILE}: {sum(map(len, recorded.values()))} functions")


def archive_of(release: Release, folder: Path) -> Path:
    """The wheel or source archive of a release in `folder`, downloaded if it is not there."""
    pattern = f"{release.stem}-*.whl" if release.has_wheel else f"{release.stem}.tar.gz"
    if not list(folder.glob(pattern)):
        platforms = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 26, 27, 28, 31, 34, 35)]
        flags = [f"--platform={name}" for name in platforms]
        flags += [f"--abi={name}" for name in ("cp312", "abi3", "none")]
        flags += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--pre"]
        if not release.has_wheel:
            flags = ["--no-binary=:all:", "--no-build-isolation"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *flags]
            + ["-d", str(folder), f"{release.name}=={release.version}"],
            check=True,
            env=os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
        )
    return next(folder.glob(pattern))


def record(release: Release, archive: Path) -> dict[str, list[Parameter]]:
    """The parameters of the functions of a release."""
    found = {}
    for path, names in release.functions.items():
        tree = ast.parse(_read(release, archive, path))
        for name in names:
            found[name] = parameters(tree, name)
    return found


def _read(release: Release, archive: Path, path: str) -> bytes:
    if release.has_wheel:
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(path)
    with tarfile.open(archive) as source:
        member = source.extractfile(f"{release.stem}/{path}")
        assert member is not None, f"{path} is a folder"
        return member.read()


def parameters(tree: ast.Module, name: str) -> list[Parameter]:
    """The parameters of a function or method of a module.

    Raises:
        LookupError: the module does not define it.
    """
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for cls in classes:
        body = [x for node in body if _is(node, ast.ClassDef, cls) for x in node.body]  # type: ignore[attr-defined]
    for node in reversed(body):  # an overload precedes the definition
        if _is(node, ast.FunctionDef, function):
            assert isinstance(node, ast.FunctionDef)
            return list(_parameters(node.args))
    raise LookupError(f"no definition of {name}: find its new place in the wheel")


def _is(node: ast.stmt, kind: type, name: str) -> bool:
    return isinstance(node, kind) and node.name == name  # type: ignore[attr-defined]


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [(a, inspect.Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults = [None] * required + list(arguments.defaults)
    for (argument, kind), default in zip(positional, defaults, strict=True):
        yield argument.arg, kind.name, default and ast.unparse(default)
    if arguments.vararg:
        yield arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL.name, None
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, inspect.Parameter.KEYWORD_ONLY.name, default and ast.unparse(default)
    if arguments.kwarg:
        yield arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD.name, None


def _text(recorded: dict[str, dict[str, list[Parameter]]]) -> str:
    """JSON with one parameter in a line, so that a change of one is one line of a diff."""
    releases = []
    for release, functions in recorded.items():
        parts = []
        for name, found in functions.items():
            lines = ",\n".join(f"   {json.dumps(parameter)}" for parameter in found)
            parts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        releases.append(f" {json.dumps(release)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(releases) + "\n}\n"


if __name__ == "__main__":
    main()
