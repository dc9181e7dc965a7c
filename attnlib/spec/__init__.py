"""What an attention layer needs from a backend.

`AttentionSpec` contains everything that may decide whether a backend supports a layer, and nothing
else: `attnlib.capabilities` has exactly one check for each field. Values that do not affect the
choice (the softmax scale, the values of slopes and sinks) are parameters of the layer.
"""

from attnlib.spec.attention_spec import AttentionSpec
from attnlib.spec.kinds import AttentionType, CudaGraphSupport, MaskKind, Window

__all__ = ["AttentionSpec", "AttentionType", "CudaGraphSupport", "MaskKind", "Window"]
