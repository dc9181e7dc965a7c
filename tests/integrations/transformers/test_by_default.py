"""attnlib as the default implementation, for `attnlib run`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

import transformers  # noqa: E402

import attnlib.integrations.transformers as integration  # noqa: E402
from attnlib.errors import UnsupportedConfigError  # noqa: E402
from attnlib.integrations.transformers.by_default import use_by_default  # noqa: E402
from tests.integrations.tiny_models import DECODERS  # noqa: E402


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    yield
    integration.unregister()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before
    integration.register()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_model_without_a_named_implementation_uses_attnlib(name: str) -> None:
    """gpt_oss would use eager: sdpa has no sinks."""
    model = DECODERS[name]()
    assert model.config._attn_implementation != "attnlib"
    use_by_default()
    use_by_default()
    model = type(model)(type(model.config)(**{
        key: value for key, value in model.config.to_dict().items() if key != "dtype"
    }))  # fmt: skip
    assert model.config._attn_implementation == "attnlib"


def test_a_model_whose_implementation_cannot_be_set_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_by_default()
    monkeypatch.setattr(
        transformers.LlamaForCausalLM,
        "_can_set_attn_implementation",
        classmethod(lambda cls: False),
    )
    assert DECODERS["llama"]().config._attn_implementation == "sdpa"


def test_a_version_that_chooses_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(transformers.PreTrainedModel, "get_correct_attn_implementation")
        with pytest.raises(UnsupportedConfigError, match="attn_implementation='attnlib'"):
            use_by_default()
