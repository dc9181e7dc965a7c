"""`attnlib verify --kv-format`: what it passes, and which check names a mistake (P16)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_formats import (
    PAGE_FORMATS,
    KVFormat,
    find_kv_format,
    load_kv_format,
    register_kv_format,
    unregister_kv_format,
)
from attnlib.ops.params import AttentionParams
from attnlib.testing.commands import verify_main
from attnlib.testing.conformance import run_conformance
from tests.kv_formats.conftest import MODULE, rotated4
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_kv_formats import WRONG_FORMATS

__all__ = ["rotated4"]

NUMBERS = ",".join(f"KV{number}" for number in (*range(1, 9), 14))


@pytest.mark.parametrize("name", [*PAGE_FORMATS, f"{MODULE}:ROTATED_4BIT"])
def test_right_formats_pass(name: str) -> None:
    """The formats of the library, and that of the example package."""
    report = run_conformance("torch", device="cpu", quick=True, kv_format=name)
    assert report.passed, str(report)
    assert len({result.check for result in report.results}) == (14 if ":" in name else 13)
    assert "unsupported" not in {result.outcome.value for result in report.results}
    if ":" in name:
        unregister_kv_format("example:rotated4")


def _encode_powers(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Integers, and the exponent of a power of two; 127 for a NaN."""
    has_nan = x.isnan().any(-1, keepdim=True)
    x = x.nan_to_num(0.0).clamp(-1e30, 1e30)
    exponent = (x.abs().amax(-1, keepdim=True) / 127.0).log2().ceil().clamp(-120.0, 120.0)
    numbers = (x * torch.exp2(-exponent)).round().to(torch.int8)
    return numbers, torch.where(has_nan, 127.0, exponent).to(torch.int8).view(dtype)


def _decode_powers(numbers: Tensor, scale: Tensor) -> Tensor:
    exponent = scale.view(torch.int8).float()
    return numbers.float() * torch.where(exponent == 127.0, torch.nan, torch.exp2(exponent))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_scales_of_one_byte(dtype: torch.dtype) -> None:
    stored = KVFormat(
        name="tests:powers", dtype=torch.int8, bits=8, scale_dtype=dtype, groups_per_head=1,
        encode=partial(_encode_powers, dtype=dtype), decode=_decode_powers, error=0.03,
    )  # fmt: skip
    register_kv_format(stored)
    try:
        report = run_conformance("torch", device="cpu", kv_format=stored.name)
    finally:
        unregister_kv_format(stored.name)
    assert report.passed, str(report)


@pytest.mark.parametrize("mistake", WRONG_FORMATS)
def test_a_wrong_format_fails_the_check_that_names_its_mistake(mistake: str) -> None:
    made, check = WRONG_FORMATS[mistake]
    stored = register_kv_format(replace(made, name="example:wrong"))
    try:
        settings: dict[str, Any] = {"device": "cpu", "quick": True, "only": NUMBERS}
        report = run_conformance("torch", kv_format=stored.name, **settings)
    finally:
        unregister_kv_format(stored.name)
    assert check in report.failed_checks(), report
    if check != "KV1":
        assert "raised" not in next(one for one in report.failures if one.check == check).message


class WritesItsNeighbor(TorchImpl):
    """One more slot than asked for."""

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedKVCache, slots: Tensor) -> None:
        super().write_kv(key, value, cache, slots)
        if slots.numel():
            scale = cache.k_scale
            assert isinstance(scale, Tensor)
            scale.view(torch.uint8)[-1, -1, -1, 0] ^= 1


class GuessesTheFormat(TorchImpl):
    """From dtypes and sizes."""

    def attention_params(self, metadata: Any, cache: PagedKVCache | None = None) -> AttentionParams:
        found = super().attention_params(metadata, cache)
        four = find_kv_format("example:two_scales")
        return replace(found, k_format=four if found.k_format else None)


class InheritsTheWrite(TorchImpl):
    """As a backend of another package does."""

    write_kv = AttentionImpl.write_kv


class OtherLse(TorchImpl):
    """Of base 2."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        super().forward(*args, **kwargs)
        lse = kwargs.get("lse", args[4] if len(args) > 4 else None)
        if lse is not None:
            lse *= 1.4426950408889634


def _backend(impl: type[TorchImpl]) -> type[AttentionBackend]:
    class Wrong(TorchBackend):
        """A backend with another impl."""

        @staticmethod
        def get_impl_cls() -> type[TorchImpl]:
            return impl

    return Wrong


@pytest.mark.parametrize(
    ("impl", "check"), [(WritesItsNeighbor, "KV9"), (GuessesTheFormat, "KV11"), (OtherLse, "KV13")]
)
def test_a_wrong_backend_fails(rotated4: KVFormat, impl: type[TorchImpl], check: str) -> None:
    twice = replace(
        rotated4, name="example:two_scales",
        decode=lambda codes, scale: 2.0 * rotated4.decode(codes, scale),  # type: ignore[misc]
    )  # fmt: skip
    register_kv_format(twice)
    try:
        report = run_conformance(
            _backend(impl), device="cpu", quick=True, only=check, kv_format=rotated4.name
        )
    finally:
        unregister_kv_format(twice.name)
    assert report.failed_checks() == (check,), report


def test_the_write_that_backends_inherit(rotated4: KVFormat) -> None:
    settings: dict[str, Any] = {"device": "cpu", "only": "KV9", "kv_format": rotated4.name}
    assert run_conformance(_backend(InheritsTheWrite), **settings).passed


def test_blocks_without_their_scales_fail(
    rotated4: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = property(lambda cache: (cache.key_cache, cache.value_cache))
    monkeypatch.setattr(PagedKVCache, "block_views", elements)
    report = run_conformance("torch", device="cpu", only="KV10", kv_format=rotated4.name)
    assert report.failed_checks() == ("KV10",), report


def test_the_command(rotated4: KVFormat, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kv-format", rotated4.name, "--quick", "--device", "cpu"]
    assert verify_main([*arguments, "--only", "KV5"]) == 0
    out = capsys.readouterr().out
    assert "verify --kv-format example:rotated4 torch" in out and "PASSED" in out
    assert "declared" not in out, "the coverage of the backend is not what is tested"
    assert verify_main([*arguments, "--only", "KV5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_format"] == "example:rotated4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a backend, or a KV format with --kv-format"),
        (["--kv-format", "no_such:thing"], "no KV format is named 'no_such:thing'"),
        (["--kv-format", "attnlib.errors:ContractError"], "give the path of a KVFormat"),
        (["--kv-format", "attnlib.errors:Nothing"], "attnlib.errors has no 'Nothing'"),
        (["--kv-format", "nvfp4", "--score", "a:b"], "give one of them"),
        (["--kv-format", "nvfp4", "--certify", "batch-invariance"], "leave out --kv-format"),
        (["--kv-format", "nvfp4", "--only", "Q5"], "no case matches --only Q5"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "broken_format.py").write_text("1 / 0\n")
    with pytest.raises(ContractError, match="cannot be imported: ZeroDivisionError"):
        load_kv_format(f"{tmp_path / 'broken_format.py'}:FORMAT")


def test_a_backend_that_does_not_read_the_format(rotated4: KVFormat) -> None:
    with pytest.raises(UnsupportedConfigError, match="does not read example:rotated4: open KV"):
        run_conformance(ToyBackend, device="cpu", kv_format=rotated4.name)
