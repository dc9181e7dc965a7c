"""What a format may declare (P16)."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.kv_formats import PAGE_FORMATS, KVFormat, plain_format


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a:b:c"}, "write package:name"),
        ({"name": "package:"}, "write package:name"),
        ({"name": 7}, "write package:name"),
        ({"version": 0}, "version=0: it must be an integer of at least 1"),
        ({"version": True}, "version=True: it must be an integer"),
        ({"bits": 0}, "bits=0: it must be an integer of at least 1"),
        ({"bits": 3}, "heads of 2 elements of 3 bits are not whole bytes; use a multiple of 8"),
        ({"head_size_multiple": 1}, "use a multiple of 2"),
        ({"dtype": torch.float16}, "elements must have one byte"),
        ({"dtype": "uint8"}, "elements must have one byte"),
        ({"scale_dtype": None}, "every format has scales"),
        ({"scale_dtype": torch.float64}, "every format has scales"),
        ({"groups_per_head": 0}, "give one of groups_per_head and elements_per_group"),
        ({"elements_per_group": 16}, "give one of groups_per_head and elements_per_group"),
        ({"groups_per_head": -1}, "it must be an integer of at least 0"),
        ({"groups_per_head": 0, "elements_per_group": 16}, "a multiple of elements_per_group=16"),
        ({"encode": None}, "give a function"),
        ({"decode": 3}, "give a function"),
        ({"error": 0.0}, "state a bound of the relative error"),
        ({"span": (2.0, 1.0)}, "it must be a pair"),
        ({"span": 2.0}, "it must be a pair"),
        ({"span": ("1", 2.0)}, "it must be a pair"),
        ({"largest": "127"}, "it must be a number of at least 0"),
        ({"rotated": 1}, "it must be True or False"),
    ],
)
def test_wrong_fields_are_refused(
    rotated4: KVFormat, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match="KV format .* has ") as error:
        replace(rotated4, **changes)
    assert message in str(error.value)


def test_sizes(rotated4: KVFormat) -> None:
    assert (rotated4.stored_size(128), rotated4.num_scales(128)) == (64, 1)
    assert rotated4.bytes_per_head(128) == 66 and rotated4.head_size(64) == 128
    three = replace(rotated4, bits=3, head_size_multiple=8, number=None)
    assert (three.stored_size(64), three.head_size(24)) == (24, 64)


def test_what_the_functions_return_is_checked(rotated4: KVFormat) -> None:
    """Before anything is written: a wrong size would overwrite the next part of a page."""
    x, encode, decode = torch.ones(2, 3, 16), rotated4.encode, rotated4.decode
    assert encode is not None and decode is not None
    elements, scales = rotated4.store(x)
    assert (elements.shape, scales.shape) == ((2, 3, 8), (2, 3, 1))
    wide = replace(rotated4, encode=lambda x: (encode(x)[0].repeat(1, 2), encode(x)[1]))
    with pytest.raises(ContractError, match=r"torch.uint8, \(6, 16\).* its fields declare .*8\)"):
        wide.store(x)
    alone = replace(rotated4, encode=lambda x: encode(x)[0])
    with pytest.raises(ContractError, match=r"encode of example:rotated4 returns \[.*\(6, 8\)"):
        alone.store(x)
    double = replace(rotated4, decode=lambda codes, scale: decode(codes, scale).double())
    with pytest.raises(ContractError, match=r"must return \[\(torch.float32, \(6, 16\), 'cpu'\)"):
        double.load(elements, scales)
    elsewhere = replace(
        rotated4,
        encode=lambda x: tuple(part.to("meta") for part in encode(x)),
        decode=lambda codes, scale: decode(codes, scale).to("meta"),
    )
    with pytest.raises(ContractError, match=r"returns \[.*'meta'.* fields declare .*'cpu'"):
        elsewhere.store(x)
    with pytest.raises(ContractError, match=r"returns \[.*'meta'.* must return .*'cpu'"):
        elsewhere.load(elements, scales)


def test_functions_get_contiguous_tensors(rotated4: KVFormat) -> None:
    """Keys of one KV head are rows of a fused projection, and the parts of a page are apart."""
    encode, decode = rotated4.encode, rotated4.decode
    assert encode is not None and decode is not None
    flat = replace(
        rotated4,
        encode=lambda x: encode(x.view(-1).view(x.shape)),
        decode=lambda codes, scale: decode(codes.view(-1).view(codes.shape), scale),
    )
    rows = torch.randn(5, 40)[:, None, 8:24]
    elements, scales = flat.store(rows)
    wide = torch.cat((elements, elements), -1)[..., : elements.shape[-1]]
    assert torch.equal(flat.load(wide, scales), rotated4.load(*rotated4.store(rows)))


def test_formats_are_pickled_by_name_and_version(rotated4: KVFormat) -> None:
    for stored in (rotated4, PAGE_FORMATS["nvfp4"], plain_format(torch.bfloat16)):
        assert pickle.loads(pickle.dumps(stored)) is stored
    other = pickle.dumps(replace(rotated4, version=2))
    with pytest.raises(ContractError, match="version 2 of example:rotated4.* has version 1"):
        pickle.loads(other)
