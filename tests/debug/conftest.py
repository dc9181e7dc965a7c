"""The tensors of these tests are small: one thread is faster than several."""

from tests.testing.conftest import one_thread

__all__ = ["one_thread"]
