"""Open formats with a device function in the portable kernels (P16)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_formats import KVFormat, register_kv_format, unregister_kv_format
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.score_functions import where
from attnlib.testing.conformance import run_conformance
from tests.fresh_process import run_program
from tests.kv_formats.device_formats import SQUARES, STEPS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def squares() -> Iterator[KVFormat]:
    """ "tests:squares"; also registers "tests:steps"."""
    yield [register_kv_format(stored) for stored in (STEPS, SQUARES)][1]
    for stored in (STEPS, SQUARES):
        unregister_kv_format(stored.name)


def _spec(name: str, **changes: Any) -> attnlib.AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 2, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32,
        "kv_cache_dtype": name, **changes,
    }  # fmt: skip
    return attnlib.AttentionSpec(**fields)


def _outputs(spec: attnlib.AttentionSpec) -> list[torch.Tensor]:
    """Of a decode after a prefill, by torch and by triton."""
    found = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        layer = attnlib.Attention(spec, backend=backend, device="cpu")
        cache = attnlib.PagedKVCache.allocate(spec, 2, "cpu")
        for query_len, seq_len in ((19, 19), (1, 20)):
            batch = attnlib.CommonAttentionMetadata.from_lengths(
                [query_len], [seq_len], [[1, 0]], 16, "cpu"
            )
            metadata = layer.backend.make_builder(spec, "cpu").build(0, batch)
            q, k, v = (torch.randn(query_len, heads * 64) for heads in (2, 1, 1))
            out = layer(q, k, v, cache, metadata)
        found.append(out)
    return found


@pytest.mark.parametrize("changes", [{}, {"kv_rotation": "hadamard"}])
def test_four_bits(rotated4: KVFormat, changes: dict[str, Any]) -> None:
    torch.testing.assert_close(*_outputs(_spec(rotated4.name, **changes)), rtol=1e-4, atol=1e-5)


def test_eight_bits_and_pairs(squares: KVFormat, rotated4: KVFormat) -> None:
    for values in (None, rotated4.name):
        spec = _spec(squares.name, value_cache_dtype=values)
        torch.testing.assert_close(*_outputs(spec), rtol=1e-4, atol=1e-5)
    spec = _spec("int8_per_token_head", value_cache_dtype=rotated4.name)
    torch.testing.assert_close(*_outputs(spec), rtol=1e-4, atol=1e-5)


def linear(word: Any, part: int) -> Any:
    """The numbers of a format with the sizes of `SQUARES`."""
    code = (word >> (8 * part)) & 255
    return where(code > 127, -((code & 127) * 1.0), code * 1.0)


def test_launches_belong_to_a_format() -> None:
    """Two formats with the same sizes and dtypes, in calls of the operation."""
    other = replace(SQUARES, name="tests:linear", number=linear)
    torch.manual_seed(0)
    elements = torch.randint(0, 256, (2, 16, 1, 64), dtype=torch.uint8)
    scales, q = torch.rand(2, 16, 1, 1), torch.randn(1, 2, 64)
    lengths = (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    table, found = torch.tensor([[0, 1]], dtype=torch.int32), []
    for stored in (SQUARES, other, SQUARES):
        params = AttentionParams(
            scale=0.01, k_scale=scales, v_scale=scales, k_format=stored, v_format=stored
        )
        out = torch.empty(1, 2, 64)
        bounds: dict[str, Any] = {"max_query_len": 1, "max_seq_len": 20}
        paged_decode(q, elements, elements, table, *lengths, params, out=out, **bounds)
        found.append(out)
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


def test_the_kernel_does_not_write_an_open_format() -> None:
    """It would store another format with these dtypes."""
    x, cache = torch.zeros(1, 1, 64), torch.zeros(1, 4, 1, 64, dtype=torch.uint8)
    scales, slots = torch.zeros(1, 4, 1, 1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ContractError, match="tests:squares is written by its own functions"):
        write_kv(x, x, cache, cache, slots, k_scale=scales, v_scale=scales, k_format=SQUARES)


_KEYS = """
import pathlib, sys
from dataclasses import replace
from attnlib.ops.triton.quantized_pages import _numbers
from tests.kv_formats.device_formats import SQUARES

keys = set()
for factor in ("1.0", "2.0"):
    name = "factor" + factor[0]
    source = f"def number(word, part):\\n    return ((word >> (8 * part)) & 127) * {factor}\\n"
    pathlib.Path(name + ".py").write_text(source)
    sys.path.insert(0, ".")
    module = __import__(name)
    found = _numbers(replace(SQUARES, number=module.number), SQUARES)
    keys.add(found["NUMBER_KEYS"])
    table = replace(SQUARES, bits=4, head_size_multiple=2, number=(float(factor),) * 16)
    keys.add(_numbers(table, table)["NUMBER_KEYS"])
print(len(keys), min(len(key) for keys in keys for key in keys))
"""


@pytest.mark.slow
def test_compiled_kernels_are_found_by_the_code_of_a_function(tmp_path: Path) -> None:
    """Triton's cache has functions in CONFIG by name, which does not change with their code."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_program(_KEYS, given, [tmp_path, ROOT], tmp_path)
    assert done.stdout.split() == ["4", "64"], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tests:squares", "tests:steps", "example:rotated4"])
def test_conformance(squares: KVFormat, rotated4: KVFormat, name: str) -> None:
    """The checks of `attnlib verify triton --kv-format` in short."""
    cases = "KV14,KV9/bytes-mixed-HND_ROWS,KV11,KV12/visible-key,KV13/rotation-None"
    report = run_conformance("triton", device="cpu", quick=True, only=cases, kv_format=name)
    assert report.passed, str(report)


def wrong_number(word: Any, part: int) -> Any:
    """Reads the other half of the word."""
    code = (word >> (8 - 8 * part)) & 255
    return where(code > 127, -((code & 127) * 1.0), code * 1.0)


def too_large(word: Any, part: int) -> Any:
    """The numbers of `SQUARES` without a bound."""
    return ((word >> (8 * part)) & 255) * 1e6


@pytest.mark.parametrize("function", [wrong_number, too_large])
def test_a_wrong_device_function_fails(function: Any) -> None:
    made = {"name": "tests:wrong", "number": function}
    if function is too_large:
        made |= {"decode": lambda codes, scale: codes.float() * 1e6 * scale}
    stored = register_kv_format(replace(SQUARES, **made))
    try:
        report = run_conformance("torch", device="cpu", only="KV14", kv_format=stored.name)
        assert report.failed_checks() == ("KV14",), report
    finally:
        unregister_kv_format(stored.name)


TABLE = [0.0, 1.0]


def from_a_list(word: Any, part: int) -> Any:
    """Indexes what kernels have not."""
    return TABLE[word & part]


def with_a_branch(word: Any, part: int) -> Any:
    """A condition that differs from word to word."""
    if word > 3:
        return word * 1.0
    return word * 2.0


def no_number(word: Any, part: int) -> Any:
    """Returns what is no number."""
    return "word"


def _closure() -> Any:
    level = 3.0
    return lambda word, part: level


def test_what_has_no_device_function(rotated4: KVFormat) -> None:
    with pytest.raises(ContractError, match="write it with def|captures level"):
        replace(SQUARES, number=_closure())
    advice = "leave out number, with which kernels read heads of 4 or 8 bits and one floating-point"
    with pytest.raises(ContractError, match=f"has groups_per_head=2: {advice} scale"):
        replace(SQUARES, groups_per_head=2)
    with pytest.raises(ContractError, match=f"has bits=2: {advice}"):
        replace(SQUARES, bits=2, head_size_multiple=4)
    for numbers in ((1.0,) * 15, (torch.nan,) * 16, [1.0] * 16):
        with pytest.raises(
            ContractError, match="neither a function nor a tuple of 16 finite numbers"
        ):
            replace(rotated4, number=numbers)
    with pytest.raises(ContractError, match=f"has elements_per_group=32: {advice}"):
        replace(rotated4, groups_per_head=0, elements_per_group=32, head_size_multiple=32)
    with pytest.raises(ContractError, match="TABLE, a list; a device function may .* 16 numbers"):
        replace(SQUARES, number=from_a_list)
    for function, error in ((with_a_branch, "RuntimeError"), (no_number, "TypeError")):
        with pytest.raises(ContractError, match=f"number of KV format 'tests:.*raises {error}"):
            replace(SQUARES, number=function)
    with pytest.raises(ContractError, match="it must take 2: .word, part."):
        replace(SQUARES, number=where)
    plain = register_kv_format(replace(rotated4, name="example:reference", number=None))
    try:
        reason = "open KV format example:reference: no device function .KVFormat.number"
        with pytest.raises(UnsupportedConfigError, match=reason):
            attnlib.get_attn_backend(_spec(plain.name), backend="triton", device="cpu")
    finally:
        unregister_kv_format(plain.name)
    for other, reason in (("auto", "values in the dtype of the model"), ("mxfp4", "with mxfp4")):
        spec = _spec(rotated4.name, value_cache_dtype=other)
        with pytest.raises(UnsupportedConfigError, match=reason):
            attnlib.get_attn_backend(spec, backend="triton", device="cpu")
