"""A plug-in of SGLang: its norms, activations and rotary embeddings run as PyTorch code.

SGLang's kernels have no float32. With this plug-in its engine runs in float32, so that tokens can
be compared with transformers one by one, and it compiles nothing when it starts.
`sglang_tokens.py --native` uses it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Select the PyTorch code of each operation; SGLang calls this before it builds a model."""
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.model_executor import forward_batch_info

    MultiPlatformOp.dispatch_forward = lambda self: self.forward_native
    forward_batch_info.clamp_position = forward_batch_info._clamp_position_native
