"""SGLang's side of the interface, as far as the adapter uses it. SGLang itself is not installed."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class Mode(Enum):
    """The part of SGLang's ForwardMode that the adapter asks."""

    EXTEND = 1
    DECODE = 2
    TARGET_VERIFY = 3
    IDLE = 4
    DRAFT_EXTEND_V2 = 5

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is Mode.DRAFT_EXTEND_V2

    def is_idle(self) -> bool:
        return self is Mode.IDLE


class Pool:
    """SGLang's `MHATokenToKVPool`: a flat buffer of slots per layer; the first page is padding."""

    def __init__(self, slots: int, page: int, heads: int, size: int, layers: int = 2) -> None:
        shape = (layers, slots + page, heads, size)
        self.keys, self.values = torch.randn(shape), torch.randn(shape)

    def as_latents(self, rank: int) -> None:
        """The values are a part of the keys, as in SGLang's `MLATokenToKVPool`."""
        self.values = self.keys[..., :rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[layer_id], self.values[layer_id]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the modules of SGLang that the adapter imports; what was registered."""
    registered: dict[str, Any] = {"hooks": [], "choices": [], "more": {}, "backends": {}}
    kinds = "draft", "deterministic", "radix_supported_deterministic"

    class AttentionBackend:
        pass

    def register_attention_backend(name: str) -> Any:
        return lambda create: registered["backends"].setdefault(name, create)

    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            f"add_{kind}_attention_backend_choices": registered["more"].setdefault(kind, []).extend
            for kind in kinds
        },
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(
                register=lambda target, hook, kind: registered["hooks"].append(target)
            ),
            "HookType": SimpleNamespace(AROUND="around"),
        },
        "sglang.srt.server_args": {"add_attention_backend_choices": registered["choices"].extend},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("backend", "trees"):
        monkeypatch.delitem(sys.modules, f"attnlib.integrations.sglang.{name}", raising=False)
    return registered


def make_runner(page: int, pool: Pool, requests: int = 4, context_len: int = 256) -> Any:
    """A model runner as the adapter sees it."""
    return SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.zeros(requests, context_len, dtype=torch.int32)
        ),
        page_size=page,
        model_config=SimpleNamespace(context_len=context_len, is_encoder_decoder=False),
        server_args=SimpleNamespace(speculative_eagle_topk=None, dcp_size=1),
        dtype=torch.float32,
        device="cpu",
        use_mla_backend=False,
    )
