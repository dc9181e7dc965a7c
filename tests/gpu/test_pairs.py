"""Every ordered pair of the backends that run on this GPU, those of other packages included."""

from __future__ import annotations

import pytest
import torch

from attnlib.testing import BackendParity

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.gpu
class TestPairs(BackendParity):
    """Writes, reads, LSE and captured steps in both directions."""

    device = "cuda:0"
