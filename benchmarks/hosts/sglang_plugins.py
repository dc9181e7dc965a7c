"""Let the processes that SGLang starts find plug-ins of this folder."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["enable"]


def enable(module: str) -> None:
    """Add `register` of a module of this folder to SGLang's plug-ins.

    Args:
        module: `sglang_native` or `sglang_fa3`.
    """
    site = Path(tempfile.mkdtemp())
    distribution = site / f"{module}-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{module} = {module}:register\n"
    )
    folders = [str(site), str(Path(__file__).parent)]
    sys.path[:0] = folders  # processes that multiprocessing spawns get the path of this one
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(folders + ([known] if known else []))
