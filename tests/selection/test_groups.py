"""One backend per layer group, one layout for all groups (C1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnlib.backends.torch import TorchBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.capabilities import Capabilities
from attnlib.errors import ContractError, LayoutMismatchError, UnsupportedConfigError
from attnlib.selection import register_backend, unregister_backend
from attnlib.selection.groups import select_for_groups
from attnlib.spec import AttentionSpec, AttentionType


def _backend(name: str, **changes: Any) -> type[TorchBackend]:
    stated = {**TorchBackend.capabilities.stated(), **changes}
    methods = {"get_name": staticmethod(lambda: name), "capabilities": Capabilities(**stated)}
    return type(name, (TorchBackend,), methods)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_backend(
        "full_only",
        _backend("full_only", sliding_window=False, kv_cache_layouts=("HND", "NHD")),
        priority=150,
    )
    register_backend("hnd_only", _backend("hnd_only", kv_cache_layouts=("HND",)))
    register_backend("nhd_only", _backend("nhd_only", kv_cache_layouts=("NHD",)))
    yield
    for name in ("full_only", "hnd_only", "nhd_only"):
        unregister_backend(name)


def spec_of(**changes: Any) -> AttentionSpec:
    return AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, **changes)


GROUPS = {"full": spec_of(), "window": spec_of(sliding_window=8)}


def test_each_group_gets_its_own_backend() -> None:
    """C1, vllm#38891: a group that few backends support does not decide for the others."""
    selected = select_for_groups(GROUPS, device="cpu")
    assert {name: backend.get_name() for name, backend in selected.backends.items()} == {
        "full": "full_only",
        "window": "torch",
    }
    assert selected.layout == "HND" and {
        spec.kv_cache_layout for spec in selected.specs.values()
    } == {"HND"}
    assert str(selected) == "full: full_only\nwindow: torch\nlayout: HND"


def test_requests_for_some_groups_and_for_all() -> None:
    some = select_for_groups(GROUPS, {"full": "torch"}, device="cpu")
    assert some.backends["full"] is TorchBackend
    assert {
        backend.get_name()
        for backend in select_for_groups(GROUPS, "nhd_only", device="cpu").backends.values()
    } == {"nhd_only"}
    with pytest.raises(UnsupportedConfigError, match="sliding_window=8"):
        select_for_groups(GROUPS, "full_only", device="cpu")
    with pytest.raises(ContractError, match="group 'windows', but the groups are 'full', 'window'"):
        select_for_groups(GROUPS, {"windows": "torch"}, device="cpu")


def test_no_common_layout_names_every_group() -> None:
    """K5 for layouts: the message lists what each backend reads."""
    with pytest.raises(
        LayoutMismatchError, match=r"full \(hnd_only\) reads HND; window \(nhd_only\) reads NHD"
    ):
        select_for_groups(GROUPS, {"full": "hnd_only", "window": "nhd_only"}, device="cpu")


def test_the_layout_of_a_spec_or_of_the_environment_applies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        select_for_groups({**GROUPS, "full": spec_of(kv_cache_layout="NHD")}, device="cpu").layout
        == "NHD"
    )
    monkeypatch.setenv("ATTNLIB_KV_CACHE_LAYOUT", "NHD")
    assert select_for_groups(GROUPS, device="cpu").layout == "NHD"


@pytest.mark.parametrize("others", [{}, {"full": spec_of()}])
@pytest.mark.parametrize("requested", [None, "NHD", "NHD_INTERLEAVED"])
def test_caches_of_formats_with_scales_in_the_page_are_allocated(
    others: dict[str, AttentionSpec], requested: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13: pages have layouts of their own, beside those of other groups."""
    if requested:
        monkeypatch.setenv("ATTNLIB_KV_CACHE_LAYOUT", requested)
    pages = spec_of(kv_cache_dtype="int8_per_token_head")
    found = select_for_groups({"pages": pages, **others}, TorchBackend, "cpu")
    caches = {name: PagedKVCache.allocate(spec, 2, "cpu") for name, spec in found.specs.items()}
    in_pages = "NHD_INTERLEAVED" if requested == "NHD_INTERLEAVED" else "HND_INTERLEAVED"
    assert caches["pages"].layout == in_pages
    assert found.layout == (caches["full"].layout if others else in_pages)


def test_groups_without_a_cache_do_not_restrict_the_layout() -> None:
    encoder = {"vision": spec_of(attn_type=AttentionType.ENCODER_ONLY)}
    assert select_for_groups(encoder, device="cpu").layout is None
    assert select_for_groups({**encoder, **GROUPS}, device="cpu").layout == "HND"
