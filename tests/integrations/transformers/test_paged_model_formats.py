"""`PagedModel` over an open KV format (P16)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import serve
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.kv_formats import KVFormat
from attnlib.ops.torch.hadamard import rotate_heads
from tests.integrations.tiny_models import decoder, prompts
from tests.kv_formats.conftest import rotated4

__all__ = ["rotated4"]


class StoredCache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """The cache of transformers, over what a format makes of rotated keys and values."""

    def __init__(self, stored: KVFormat) -> None:
        super().__init__()
        self.stored = stored

    def _as_stored(self, x: torch.Tensor) -> torch.Tensor:
        heads = rotate_heads(x.flatten(0, 1), 0)
        return rotate_heads(self.stored.load(*self.stored.store(heads)), 0, inverse=True).view_as(x)

    def update(self, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return super().update(self._as_stored(key), self._as_stored(value), *rest, **more)


def test_logits_are_those_over_stored_keys_and_values(rotated4: KVFormat) -> None:
    """Chunked prefill, prefix reuse and decodes, against the model over heads that passed through
    the format."""
    model = decoder("llama")
    fields = {"kv_cache_dtype": rotated4.name, "kv_rotation": "hadamard"}
    paged = PagedModel(model, num_blocks=32, block_size=8, backend="torch", **fields)
    common = prompts(17, seed=3)[0]
    requests = [Request(i, common + prompt, 5) for i, prompt in enumerate(prompts(3, 9, 21))]
    served = serve(paged, Scheduler(PlainBlocks(32, 8), 16, 8), requests)
    assert sum(request.num_reused for request in requests) > 0
    assert {cache.format_name for _, cache in paged.layers()} == {rotated4.name}
    for request in requests:
        tokens = torch.tensor([request.tokens[:-1]])
        with torch.no_grad():
            wanted = model(tokens, past_key_values=StoredCache(rotated4)).logits[0]
            exact = model(tokens).logits[0]
        rows = slice(len(request.tokens) - 1 - len(served.logits[request.index]), None)
        found = torch.stack(served.logits[request.index])
        torch.testing.assert_close(found, wanted[rows], rtol=1e-3, atol=1e-4)
        assert not torch.allclose(found, exact[rows], rtol=1e-3, atol=1e-4), "it is quantized"
