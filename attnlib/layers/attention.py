"""`myvllm.layers.attention` of MinivLLM: the names of `attnlib.compat.minivllm`."""

from attnlib.compat.minivllm import *  # noqa: F403
from attnlib.compat.minivllm import __all__ as __all__
