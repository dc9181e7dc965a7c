"""Values of every argument that no call can have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnlib.compat.flashinfer as flashinfer
from attnlib.errors import AttnlibError

PAGES = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [1, 2, 5], [2, 3])]
SIZES = {"num_kv_heads": 2, "num_qo_heads": 4, "page_size": 4, "q_data_type": "float32"}
QUERIES = torch.randn(2, 4, 16)
VALUES = {
    "None": None,
    "text": "x",
    "-3": -3,
    "2**40": 2**40,
    "10**400": 10**400,
    "nan": float("nan"),
    "list": [1, 2],
    "pair of None": (None, None),
    "dict": {},
    "object": object(),
    "dtype": torch.float32,
    "number": torch.tensor(3),
    "list of pages": PAGES[1],
    "row": torch.zeros(4),
    "queries": QUERIES,
    "sparse": QUERIES.to_sparse(),
    "meta": QUERIES.to("meta"),
}


def new_cache() -> torch.Tensor:
    return torch.randn(8, 2, 4, 2, 16)


def planned(kind: str, init: dict[str, Any], plan: dict[str, Any]) -> Any:
    """A wrapper over two requests of one query."""
    made = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")(
        **{"float_workspace_buffer": torch.empty(1 << 16, dtype=torch.uint8), **init}
    )
    pages = dict(zip(("indptr", "indices", "last_page_len"), PAGES, strict=True))
    sizes = {"head_dim": 16}
    if kind == "Prefill":
        pages = {f"paged_kv_{name}": x for name, x in pages.items()}
        pages["qo_indptr"] = torch.tensor([0, 1, 2], dtype=torch.int32)
        sizes = {"head_dim_qk": 16}
    made.plan(**{**SIZES, **sizes, **pages, **plan})
    return made


def calls() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Name -> a function with arguments, and a call of it with some of them changed."""
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    for kind in ("Decode", "Prefill"):
        cls = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")
        found[f"{kind}.init"] = cls.__init__, lambda kind=kind, **x: planned(kind, x, {})
        found[f"{kind}.plan"] = (
            cls.plan,
            lambda kind=kind, **x: planned(kind, {}, x).run(QUERIES, new_cache()),
        )
        for name in ("run", "forward"):
            found[f"{kind}.{name}"] = (
                getattr(cls, name),
                lambda kind=kind, name=name, **x: getattr(planned(kind, {}, {}), name)(
                    **{"q": QUERIES, "paged_kv_cache": new_cache(), "return_lse": True, **x}
                ),
            )
    indptr, indices, last = PAGES
    rows = torch.tensor([0, 1], dtype=torch.int32)
    lse = torch.zeros(2, 4)
    for name, given in (
        ("merge_state", [QUERIES, lse, QUERIES, lse]),
        ("merge_state_in_place", [QUERIES.clone(), lse.clone(), QUERIES, lse]),
        ("merge_states", [QUERIES[:, None], lse[:, None]]),
        ("get_seq_lens", [indptr, last, 4]),
        ("get_batch_indices_positions", [indptr, torch.tensor([6, 3]), 3]),
        (
            "append_paged_kv_cache",
            [QUERIES[:, :2], QUERIES[:, :2], rows, rows, new_cache(), indices, indptr, last],
        ),
    ):
        function = getattr(flashinfer, name)
        first = dict(zip(inspect.signature(function).parameters, given, strict=False))
        found[name] = function, lambda function=function, first=first, **x: function(**first | x)
    return found


NAMES = [
    (call, name)
    for call, (function, _) in calls().items()
    for name, kind in inspect.signature(function).parameters.items()
    if name != "self" and kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("call", "name"), NAMES)
def test_a_value_of_any_type_is_served_or_refused(call: str, name: str) -> None:
    """No error of Python or torch reaches the caller, but FlashInfer's ValueErrors of `run`."""
    wrong, run = [], calls()[call][1]
    for kind, value in VALUES.items():
        try:
            run(**{name: value})
        except (AttnlibError, ValueError) as error:
            assert len(str(error)) > 20 and "could not convert" not in str(error)
        except Exception as error:
            wrong.append(f"{kind}: {error!r}")
    assert not wrong
