"""A plug-in of SGLang: its norms, activations and rotary embeddings run as PyTorch code.

SGLang's kernels have no float32. With this plug-in its engine runs in float32, so that tokens can
be compared with transformers one by one, and it compiles nothing when it starts.
`sglang_tokens.py --native` uses it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

__all__ = ["enable", "register"]


def enable() -> None:
    """Let the processes that SGLang starts find the plug-in."""
    site = Path(tempfile.mkdtemp())
    distribution = site / "sglang_native-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang-native\nVersion: 0\n"
    )
    (distribution / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nnative = sglang_native:register\n"
    )
    folders = [str(site), str(Path(__file__).parent)]
    sys.path[:0] = folders  # processes that multiprocessing spawns get the path of this one
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(folders + ([known] if known else []))


def register() -> None:
    """Select the PyTorch code of each operation; SGLang calls this before it builds a model."""
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.model_executor import forward_batch_info

    MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
    forward_batch_info.clamp_position = forward_batch_info._clamp_position_native
