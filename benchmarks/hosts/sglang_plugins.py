"""What the processes of SGLang's engine need on machines where not all is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

__all__ = ["prepare"]

HERE = Path(__file__).parent


def prepare(*modules: str, model: str = "llama") -> None:
    """Prepare the environment in which SGLang is imported.

    Where FlashInfer is not installed, `flashinfer_names.py` takes its place. SGLang imports one of
    its models only, because all take long.

    Args:
        modules: plug-ins of this folder, of which SGLang calls `register`: `sglang_native`,
            `sglang_fa3`.
        model: the module of `sglang.srt.models` with the model that runs.
    """
    site = Path(tempfile.mkdtemp())
    for name in modules:
        distribution = site / f"{name}-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (distribution / "entry_points.txt").write_text(
            f"[sglang.srt.plugins]\n{name} = {name}:register\n"
        )
    if find_spec("flashinfer") is None:
        (site / "flashinfer").mkdir()
        shutil.copy(HERE / "flashinfer_names.py", site / "flashinfer" / "__init__.py")
        os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    if (sglang := find_spec("sglang")) is not None and sglang.origin is not None:
        models = (Path(sglang.origin).parent / "srt" / "models").glob("*.py")
        others = {path.stem for path in models} - {model}
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))
    _name_toolkit()
    folders = [str(site), str(HERE)]
    sys.path[:0] = folders  # processes that multiprocessing spawns get the path of this one
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(folders + ([known] if known else []))


def _name_toolkit() -> None:
    """Set CUDA_HOME, with whose libraries tvm_ffi links SGLang's kernels. It takes the folder above
    that of nvcc, which may be a script in another place."""
    if "CUDA_HOME" in os.environ or shutil.which("nvcc") is None:
        return
    command = ["nvcc", "--dryrun", "-x", "cu", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    if (found := re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)) is not None:
        os.environ["CUDA_HOME"] = str(Path(found[1]).resolve())
