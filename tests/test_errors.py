"""Every error names the value, the limit and the next action: one case for each kind of error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

import attnlib
from attnlib import env, errors
from attnlib.backends.torch import TorchBackend
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup
from attnlib.cache.layout import negotiate_layout, set_kv_cache_layout
from attnlib.metadata.shared_prefix import find_shared_prefixes
from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.parallel import RankGroup
from attnlib.selection import unregister_backend
from attnlib.workspace import Workspace

SPEC = attnlib.AttentionSpec(
    num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32, block_size=16
)


@pytest.fixture(autouse=True)
def _no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def _missing_package() -> None:
    attnlib.register_backend(
        "gone", "no_such_package:Backend", install_hint="pip install no-such-package"
    )
    try:
        attnlib.get_attn_backend(SPEC, "gone", "cpu")
    finally:
        unregister_backend("gone")


def _unsupported() -> None:
    attnlib.get_attn_backend(
        SPEC.replace(kv_cache_layout="HND"), _limited(kv_cache_layouts=("NHD",), sink=False), "cpu"
    )


def _limited(**changes: object) -> type[TorchBackend]:
    capabilities = attnlib.Capabilities(**{**TorchBackend.capabilities.stated(), **changes})
    return type(
        "Limited",
        (TorchBackend,),
        {"capabilities": capabilities, "get_name": staticmethod(lambda: "limited")},
    )


def _wrong_variable() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_VALIDATE", "yes")
        env.read("ATTNLIB_VALIDATE")


def _lost_rank() -> None:
    group = RankGroup.__new__(RankGroup)
    group.world_size, group.rank, group._record_device = 2, 0, torch.device("cpu")
    group._cpu_group = SimpleNamespace(group_name="0")
    late = RuntimeError("Timed out waiting 2000ms")
    with (
        mock.patch.object(distributed, "all_gather_single", side_effect=late, create=True),
        mock.patch.object(distributed_c10d, "_get_default_store", distributed.HashStore),
        mock.patch.object(distributed.Store, "wait", side_effect=late),
    ):
        group.agree("facts")


def _state_layer() -> attnlib.StateLayer:
    spec = attnlib.StateSpec(
        num_heads=0, conv_channels=4, conv_width=2, dtype=torch.float32, max_rollback=0
    )
    return attnlib.StateLayer(spec, conv_weight=torch.ones(4, 2), device="cpu")


def _step() -> tuple[attnlib.Attention, attnlib.PagedKVCache, Any]:
    """A layer, its cache and the metadata of one decode."""
    layer = attnlib.Attention(SPEC, device="cpu")
    batch = attnlib.CommonAttentionMetadata.from_lengths([1], [4], [[0]], 16, "cpu")
    metadata = layer.backend.make_builder(SPEC, "cpu").build(0, batch)
    return layer, attnlib.PagedKVCache.allocate(SPEC, 2, "cpu"), metadata


def _call(query: Any = None, cache: attnlib.PagedKVCache | None = None) -> None:
    layer, own, metadata = _step()
    query = torch.zeros(1, 512) if query is None else query
    layer(query, torch.zeros(1, 128), torch.zeros(1, 128), cache or own, metadata)


def _rotate(query: Any = None, q_norm: Any = None) -> None:
    layer, cache, metadata = _step()
    query = torch.zeros(1, 512) if query is None else query
    rows, angles = torch.zeros(1, 128), torch.zeros(1, 32)
    layer.rotate_and_write_kv(query, rows, rows, cache, metadata, angles, angles, q_norm=q_norm)


class WrongForward(TorchBackend.get_impl_cls()):  # type: ignore[misc]  # found at run time
    """Names its parameters differently from the interface."""

    def forward(self, q, kv, metadata, out):
        pass


MESSAGES: dict[str, tuple[type[errors.AttnlibError], Callable[[], object], tuple[str, ...]]] = {
    # kind: (error, what raises it, (the value, the limit, the next action))
    "unknown name": (
        errors.UnknownBackendError,
        lambda: attnlib.get_attn_backend(SPEC, "flash_atn", "cpu"),
        (
            "'flash_atn'",
            "from argument",
            "Did you mean 'flash_attn'?",
            "Registered: fla, flash_attn, flash_mla, flashinfer, flashinfer_gdn, flashinfer_mla, "
            "torch, triton",
        ),
    ),
    "invalid request": (
        errors.UnknownBackendError,
        lambda: attnlib.get_attn_backend(SPEC, "prefill:torch", "cpu"),
        ("argument='prefill:torch'", "is not a valid request", "'prefill:NAME,decode:NAME'"),
    ),
    "unavailable": (
        errors.BackendUnavailableError,
        _missing_package,
        (
            "'gone' (from argument)",
            "No module named 'no_such_package'",
            "try: pip install no-such-package",
            "support this spec here: torch",
        ),
    ),
    "unsupported": (
        errors.UnsupportedConfigError,
        _unsupported,
        (
            "'limited' (from argument) is unsupported on cpu",
            "kv_cache_layout=HND not supported (supported: NHD)",
            "support this spec here: torch",
        ),
    ),
    "no candidate": (
        errors.UnsupportedConfigError,
        lambda: attnlib.get_attn_backend(SPEC, device=attnlib.device.DeviceInfo("tpu")),
        (
            "no backend supports this layer on tpu",
            "on tpu",
            "torch: device tpu not supported (supported: cpu, cuda",
        ),
    ),
    "no common layout": (
        errors.LayoutMismatchError,
        lambda: negotiate_layout([("layer 0", ("NHD",)), ("layer 1", ("HND",))]),
        ("layer 0 reads NHD; layer 1 reads HND", "Choose backends that share one"),
    ),
    "lost rank": (
        errors.RankLostError,
        _lost_rank,
        (
            "ranks [1] do not answer rank 0 of 2",
            "2000ms",
            "give the process group a longer timeout",
        ),
    ),
    "unknown layout": (
        errors.LayoutMismatchError,
        lambda: set_kv_cache_layout("DHN"),
        ("kv_cache_layout='DHN'", "NHD, HND, NHD_INTERLEAVED"),
    ),
    "impossible spec": (
        errors.ContractError,
        lambda: SPEC.replace(sliding_window=0),
        ("sliding_window=0", "at least 1", "None for no window", "[M2]"),
    ),
    "lengths": (
        errors.ContractError,
        lambda: attnlib.CommonAttentionMetadata.from_lengths([3], [2], [[0]], 16, "cpu"),
        ("seq_lens[0]=2", "below query_lens[0]=3", "count context and new tokens", "[M1]"),
    ),
    "narrow table": (
        errors.ContractError,
        lambda: attnlib.CommonAttentionMetadata.from_lengths([1], [40], [[0, 1]], 16, "cpu"),
        ("block_table row 0 has 2 entries", "seq_lens[0]=40 needs 3 blocks of 16 tokens", "[P3]"),
    ),
    "block out of range": (
        errors.ContractError,
        lambda: attnlib.PagedKVCache.allocate(SPEC, 2, "cpu").copy_blocks([(0, 2)]),
        ("destination block 2 (index 0)", "pool of 2 blocks (0 to 1)", "[P3]"),
    ),
    "block-sparse blocks": (
        errors.AssertedContractError,
        lambda: BlockSparsePattern(1, 4, 24, 0, 4, 2, 0).check(16),
        ("blocksparse_block_size 24", "the cache's block size 16", "choose a multiple of it"),
    ),
    "workspace": (
        errors.ContractError,
        lambda: Workspace(torch.device("cpu"), 8, fixed=True).reserve(9),
        ("needs 9 bytes", "8 were declared", "raise the BatchLimits"),
    ),
    "unknown device": (
        errors.ContractError,
        lambda: attnlib.explain(SPEC, "gpu"),
        ("device='gpu'", "'cpu', 'cuda'"),
    ),
    "device of another machine": (
        errors.ContractError,
        lambda: attnlib.PagedKVCache.allocate(SPEC, 2, "H200"),
        ("device='H200'", "is not on this machine", "use 'cpu', 'cuda', 'cuda:1'"),
    ),
    "device without tensors": (
        errors.ContractError,
        lambda: attnlib.CommonAttentionMetadata.from_lengths([1], [4], [[0]], 16, "gpu"),
        ("device='gpu'", "'cpu', 'cuda'"),
    ),
    "missing device": (
        errors.ContractError,
        lambda: attnlib.BlockTable(2, 4, "cuda:99"),
        ("no CUDA device 99", "CUDA_VISIBLE_DEVICES", "use device='cpu'"),
    ),
    "missing device of a layer": (
        errors.UnsupportedConfigError,
        lambda: attnlib.Attention(SPEC, device="cuda:99"),
        ("cuda:99 (not found)", "all backends: no CUDA device 99", "use device='cpu'"),
    ),
    "query of another type": (
        errors.ContractError,
        lambda: _call(query=[[0.0] * 512]),
        ("query is a list", "must be a torch.Tensor", "torch.as_tensor"),
    ),
    "query of another dtype": (
        errors.ContractError,
        lambda: _call(query=torch.zeros(1, 512, dtype=torch.float16)),
        ("query is torch.float16", "the spec says torch.float32", "convert it"),
    ),
    "too few rows": (
        errors.ContractError,
        lambda: _call(query=torch.zeros(0, 512)),
        ("query has 0 rows", "the batch has 1 tokens", "pass a row for each token"),
    ),
    "cache of other blocks": (
        errors.ContractError,
        lambda: _call(cache=attnlib.PagedKVCache.allocate(SPEC.replace(block_size=8), 2, "cpu")),
        ("cache has block_size=8", "the spec says 16", "call layer.set_block_size"),
    ),
    "softmax scale": (
        errors.ContractError,
        lambda: attnlib.Attention(SPEC, scale=float("nan"), device="cpu"),
        ("scale=nan", "a finite number", "None for 1/sqrt(head_size)", "[M3]"),
    ),
    "norm": (
        errors.ContractError,
        lambda: _rotate(q_norm=torch.ones(64)),
        ("q_norm is a Tensor", "attnlib.ops.HeadNorm", "HeadNorm(weight, eps=...)"),
    ),
    "rotated query of another type": (
        errors.ContractError,
        lambda: _rotate(query=[0.0]),
        ("query is a list", "must be a torch.Tensor"),
    ),
    "batch of lists": (
        errors.ContractError,
        lambda: attnlib.CommonAttentionMetadata(
            query_start_loc=[0, 1],  # type: ignore[arg-type]
            seq_lens=[5],  # type: ignore[arg-type]
            num_reqs=1,
            num_actual_tokens=1,
            max_query_len=1,
            max_seq_len=5,
        ),
        ("query_start_loc is a list", "must be a tensor", "from_lengths takes lists of lengths"),
    ),
    "bias of lists": (
        errors.ContractError,
        lambda: attnlib.CommonAttentionMetadata.from_lengths(
            [1],
            [4],
            [[0]],
            16,
            "cpu",
            query_bias=[[0.0]],  # type: ignore[arg-type]
        ),
        ("query_bias is a list", "it must be a tensor"),
    ),
    "prefixes of lists": (
        errors.ContractError,
        lambda: find_shared_prefixes([[1]], [16], 16),  # type: ignore[arg-type]
        ("block_table is a list", "an integer tensor on the CPU"),
    ),
    "pool of a list": (
        errors.ContractError,
        lambda: HybridKVCache([KVCacheGroup(SPEC, 1)], 4, "cpu"),  # type: ignore[arg-type]
        ("groups is a list", "a dictionary from group name to KVCacheGroup"),
    ),
    "states of lists": (
        errors.ContractError,
        lambda: _state_layer().convolve([[0.0]], None, None),  # type: ignore[arg-type]
        ("x is a list", "must be a torch.Tensor"),
    ),
    "one block": (
        errors.ContractError,
        lambda: attnlib.BlockAllocator(2, 16).free(0),  # type: ignore[arg-type]
        ("block_ids=0 is a int", "a list of ids, such as [0]"),
    ),
    "slots of a list": (
        errors.ContractError,
        lambda: attnlib.PagedKVCache.allocate(SPEC, 2, "cpu").move_slots([0], [1]),  # type: ignore[arg-type]
        ("source slots are a list", "int64 [n] on cpu"),
    ),
    "exchanged arguments": (
        errors.ContractError,
        lambda: attnlib.PagedKVCache.allocate(8, SPEC),  # type: ignore[arg-type]
        ("num_blocks AttentionSpec(num_heads=8", "... is a AttentionSpec", "must be an integer"),
    ),
    "a layer in place of its spec": (
        errors.ContractError,
        lambda: attnlib.PagedKVCache.allocate(attnlib.Attention(SPEC, device="cpu"), 2),
        ("PagedKVCache.allocate takes an attnlib.AttentionSpec", "pass its attribute `spec`"),
    ),
    "pages of a layer": (
        errors.ContractError,
        lambda: attnlib.PagedKVCache.from_pages(None, attnlib.Attention(SPEC, device="cpu")),
        ("PagedKVCache.from_pages takes an attnlib.AttentionSpec", "spec is a Attention"),
    ),
    "explain without a spec": (
        errors.ContractError,
        lambda: attnlib.explain({"num_heads": 8}, "cpu"),  # type: ignore[arg-type]
        ("explain takes an attnlib.AttentionSpec", "spec is a dict"),
    ),
    "groups without names": (
        errors.ContractError,
        lambda: attnlib.select_for_groups(SPEC, device="cpu"),  # type: ignore[arg-type]
        ("groups is a AttentionSpec", "a dictionary from group name to spec"),
    ),
    "builder without a spec": (
        errors.ContractError,
        lambda: TorchBackend.make_builder("cpu", SPEC),  # type: ignore[arg-type]
        ("make_builder takes an attnlib.AttentionSpec", "spec is a str"),
    ),
    "cache full": (
        errors.CacheExhaustedError,
        lambda: attnlib.BlockAllocator(2, 16).allocate(3),
        (
            "3 blocks of 16 tokens requested",
            "2 of 2 are free",
            "preempt one, or allocate a larger cache",
        ),
    ),
    "freed twice": (
        errors.ContractError,
        lambda: attnlib.BlockAllocator(2, 16).free([1]),
        ("cannot free block 1", "it has no references", "freed twice, or never allocated"),
    ),
    "incomplete class": (
        errors.RegistrationError,
        lambda: attnlib.register_backend("x", type("Empty", (attnlib.AttentionBackend,), {})),
        ("backend 'x' (Empty)", "lacks get_name, get_impl_cls"),
    ),
    "method of an instance": (
        errors.RegistrationError,
        lambda: attnlib.register_backend(
            "x", type("Bound", (TorchBackend,), {"get_name": lambda self: "x"})
        ),
        ("backend 'x' (Bound)", "get_name takes an instance", "@staticmethod or @classmethod"),
    ),
    "priority in words": (
        errors.RegistrationError,
        lambda: attnlib.register_backend("x", TorchBackend, priority="high"),  # type: ignore[call-overload]
        ("priority='high'", "must be an integer", "None for a backend that is selected by name"),
    ),
    "priority of a class": (
        errors.RegistrationError,
        lambda: attnlib.register_backend(
            "x", type("Ranked", (TorchBackend,), {"auto_priority": "high"})
        ),
        ("priority='high'", "must be an integer"),
    ),
    "wrong signature": (
        errors.RegistrationError,
        lambda: attnlib.register_backend(
            "x",
            type("Wrong", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: WrongForward)}),
        ),
        (
            "WrongForward.forward(self, q, kv, metadata, out)",
            "attnlib calls forward(self, query: ",
            "keep names and order",
        ),
    ),
    "taken name": (
        errors.RegistrationError,
        lambda: attnlib.register_backend("torch", TorchBackend),
        ("'torch' is already registered (built in)", "override=True"),
    ),
    "variable": (
        errors.EnvironmentVariableError,
        _wrong_variable,
        ("ATTNLIB_VALIDATE='yes'", "expected 0, 1 or 2", "Unset it or set one of"),
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_value_limit_and_next_action(kind: str) -> None:
    error, act, parts = MESSAGES[kind]
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is missing in {text!r}"


def test_every_exception_class_has_a_case() -> None:
    leaves = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.AttnlibError)
    } - {errors.AttnlibError}
    assert {error for error, _, _ in MESSAGES.values()} == leaves
    names = {cls.__name__ for cls in leaves} | {"AttnlibError", "Rejection"}
    assert names == set(errors.__all__)


def test_the_docstring_lists_the_classes_and_their_bases() -> None:
    """Each class, and the built-in exception that it also derives from."""
    listed = dict(re.findall(r"[|`]- (\w+) .*?\(also an? (\w+)\)", errors.__doc__ or ""))
    built_in = {
        name: getattr(errors, name).__bases__[-1].__name__
        for name in errors.__all__
        if name not in ("AttnlibError", "Rejection")
    }
    assert listed == built_in


def test_selection_errors_carry_their_reasons_as_data() -> None:
    with pytest.raises(errors.UnsupportedConfigError) as caught:
        attnlib.get_attn_backend(
            SPEC.replace(has_sink=True, kv_cache_layout="HND"),
            _limited(kv_cache_layouts=("NHD",), sink=False),
            "cpu",
        )
    assert caught.value.backend == "limited"
    assert caught.value.reasons == (
        "kv_cache_layout=HND not supported (supported: NHD)",
        "attention sinks: not supported",
    )
