"""`register` and `unregister` are inverse, and importing attnlib imports no transformers."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    cache_utils,
    masking_utils,
)
from transformers.integrations.moe import ExpertsInterface

import attnlib.integrations.transformers as integration
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.common import CommonAttentionMetadata
from tests.fresh_process import run_program
from tests.integrations.tiny_models import decoder, prompts
from tests.integrations.transformers.host_reads import HostReads

MODULES = [
    importlib.import_module(f"transformers.generation.continuous_batching.{name}")
    for name in ("continuous_api", "initialization", "cache")
]


def state() -> dict[str, Any]:
    """Everything that `register` may change."""
    found: dict[str, Any] = {
        f"{m.__name__}.{key}": value
        for m in MODULES
        for key, value in vars(m).items()
        if callable(value)
    }
    runner = importlib.import_module("transformers.generation.continuous_batching.model_runner")
    found["ModelRunner.compute_batch"] = runner.ModelRunner.compute_batch
    for owner, name in (
        (cache_utils.DynamicLayer, "update"),
        (cache_utils.DynamicSlidingWindowLayer, "update"),
        (cache_utils.StaticCache, "__init__"),
        (cache_utils.StaticLayer, "lazy_initialization"),
        (cache_utils.LinearAttentionLayer, "lazy_initialization"),
        (masking_utils, "find_packed_sequence_indices"),
    ):
        found[f"{owner.__name__}.{name}"] = getattr(owner, name)
    for interface in (AttentionInterface, AttentionMaskInterface, ExpertsInterface):
        found |= {
            f"{interface.__name__}.{key}": value for key, value in interface._global_mapping.items()
        }
    return found


def test_unregister_undoes_register() -> None:
    """Once, and after several registrations."""
    integration.unregister()
    before = state()
    integration.register()
    integration.register()
    during = state()
    integration.unregister()
    assert state() == before
    changed = {key for key in during if during[key] is not before.get(key)}
    assert any(
        key == "AttentionMaskInterface.attnlib" for key in changed
    )  # a name without a mask function silently loses padding
    names = {
        "attnlib",
        "paged|attnlib",
        "compute_batch",
        "is_flash_attention_requested",
        "ensure_decode_fast_path_is_available",
        "update",
        "__init__",
        "lazy_initialization",
        "find_packed_sequence_indices",
    }
    assert {key.rsplit(".", 1)[1] for key in changed} <= names


def test_a_model_is_created_with_the_name() -> None:
    """By configuration and by `set_attn_implementation`; unknown again after `unregister`."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=integration.NAME)
    assert model.config._attn_implementation == "attnlib"
    integration.unregister()
    with pytest.raises(ValueError, match="attnlib"):
        decoder("llama").set_attn_implementation("attnlib")


def test_calls_for_other_names_reach_the_original() -> None:
    """Only the name attnlib is treated differently."""
    for module in MODULES:
        check = module.is_flash_attention_requested
        assert check(requested_attention_implementation="flash_attention_2") is True
        assert check(requested_attention_implementation="sdpa") is False
        assert check(None, "flash_attention_2", 3) is False


def test_a_paged_step_reaches_the_paged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keyword `attnlib_step` of forward arrives with all arguments of the layer."""
    import types

    seen: list[dict[str, Any]] = []
    fake = types.ModuleType("attnlib.integrations.transformers.paged_step")

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: Any,
        **kwargs: Any,
    ) -> Any:
        seen.append({"step": step, **kwargs})
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    fake.attend = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    model, step = decoder("gemma2"), object()
    model.set_attn_implementation("attnlib")
    with torch.no_grad():
        model(torch.tensor(prompts(4)), attnlib_step=step, use_cache=False)
    assert len(seen) == 2 and all(
        call["step"] is step and call["scaling"] == 0.5 and call["softcap"] == 2.0 for call in seen
    )
    assert [call["sliding_window"] for call in seen] == [5, None]


def test_importing_attnlib_imports_no_transformers() -> None:
    """In a new process."""
    check = "import sys, attnlib; assert 'transformers' not in sys.modules"
    done = run_program(check)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("change", ["missing", "other parameters"])
def test_an_unknown_cache_stays_as_it_is(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the function and the known versions; the others are replaced."""
    integration.unregister()
    layer, caches = cache_utils.StaticLayer, cache_utils.DynamicLayer.update
    if change == "missing":
        monkeypatch.delattr(cache_utils, "DynamicSlidingWindowLayer")
    else:
        monkeypatch.setattr(layer, "lazy_initialization", lambda self, states: None)
    with caplog.at_level("WARNING", logger="attnlib"):
        integration.register()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "DynamicSlidingWindowLayer.update(" in message or "StaticLayer.lazy_init" in message
    assert "5.17 to 5.24" in message
    assert cache_utils.DynamicLayer.update is not caches


def test_a_paged_step_reads_no_positions() -> None:
    """transformers would look for packed sequences in them, which waits for a GPU."""
    paged = PagedModel(decoder("llama"), num_blocks=4, block_size=4, backend="torch")
    ids, positions = torch.arange(2, 7), torch.tensor([0, 1, 2, 0, 1])
    batch = CommonAttentionMetadata.from_lengths([3, 2], [3, 2], [[1], [2]], 4, "cpu")
    with paged.attached(), HostReads() as reads:
        reads.follow(ids)
        reads.follow(positions)
        paged.step(ids, positions, batch)
    assert reads.reads == []
    assert masking_utils.find_packed_sequence_indices(positions[None]) is not None
