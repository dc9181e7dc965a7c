"""`vllm.v1.attention.backends.utils`: the names of `attnlib.compat.vllm.backend_utils`."""

from attnlib.compat.vllm.backend_utils import *  # noqa: F403
from attnlib.compat.vllm.backend_utils import __all__ as __all__
from attnlib.compat.vllm.backend_utils import __getattr__ as __getattr__
