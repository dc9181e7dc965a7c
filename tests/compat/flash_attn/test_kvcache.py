"""`flash_attn_with_kvcache` against attention in float64."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import attnlib
from attnlib.compat.flash_attn import FlashAttentionArgumentError, flash_attn_with_kvcache
from attnlib.compat.flash_attn.prepared import STATE
from attnlib.errors import ContractError, UnsupportedConfigError
from tests.compat.reference import assert_matches, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SLOW_TRITON = ["torch", pytest.param("triton", marks=pytest.mark.slow)]
"""The interpreter is slow: the fast selection runs a few tests with it."""


@pytest.fixture(params=SLOW_TRITON)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with attnlib.use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Case:
    """Random arguments of a call, and what it must return and write."""

    def __init__(self, seed: int, **fixed: Any) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.options = {name: draw.choice(values) for name, values in VARIANTS.items()} | fixed
        o = self.options
        self.batch, self.heads, self.kv_heads, size, size_v = 3, 4, 2, 16, 8
        self.capacity, new = 48, o["new"]
        shape = (self.batch, o["queries"], self.heads, size)
        self.q = torch.randn(shape, device=DEVICE)
        self.lens = [draw.randint(new == 0, self.capacity - new) for _ in range(self.batch)]
        self.leftpad = [draw.randint(0, length) for length in self.lens] if o["leftpad"] else None
        self.index = draw.sample(range(5), self.batch) if o["index"] else list(range(self.batch))
        self.slopes = None
        if o["slopes"]:
            slope_shape = (self.heads,) if o["slopes"] == "heads" else (self.batch, self.heads)
            self.slopes = torch.rand(slope_shape, device=DEVICE) * 0.3
        rows = 5 if o["index"] else self.batch
        caches = [torch.randn(rows, self.capacity, self.kv_heads, d) for d in (size, size_v)]
        self.caches = [cache.to(DEVICE) for cache in caches]
        self.new = [torch.randn(self.batch, new, self.kv_heads, d, device=DEVICE) if new else None
                    for d in (size, size_v)]  # fmt: skip
        self.table = self.paged = None
        if o["page"]:
            columns = self.capacity // o["page"]
            order = torch.randperm(self.batch * columns + 3)[: self.batch * columns]
            self.table = order.int().view(self.batch, columns).to(DEVICE)
            self.paged = []
            for cache in self.caches:
                pool = torch.randn(
                    self.batch * columns + 3, o["page"], *cache.shape[2:], device=DEVICE
                )
                pool[self.table.long()] = cache[: self.batch].view(
                    self.batch, columns, o["page"], *cache.shape[2:]
                )
                self.paged.append(pool)

    def call(self, **changes: Any) -> Any:
        """The result of the function."""
        o = self.options
        arguments: dict[str, Any] = {
            "cache_seqlens": self._ints(self.lens),
            "cache_batch_idx": self._ints(self.index) if o["index"] else None,
            "cache_leftpad": self._ints(self.leftpad),
            "block_table": self.table,
            "softmax_scale": o["scale"],
            "causal": o["causal"],
            "window_size": o["window"],
            "softcap": o["softcap"],
            "alibi_slopes": self.slopes,
            "return_softmax_lse": True,
        }
        caches = self.paged or self.caches
        names = ("q", "k_cache", "v_cache", "k", "v")
        arguments.update(zip(names, (self.q, *caches, *self.new), strict=False))
        return flash_attn_with_kvcache(**(arguments | changes))

    def check(self, result: Any) -> None:
        """Compare a result and the written caches with the definition."""
        o, keys_of = self.options, self.content()
        for request in range(self.batch):
            start = self.leftpad[request] if self.leftpad else 0
            end = self.lens[request] + o["new"]
            slopes = self.slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[request]
            keys, values = (cache[request][start:end] for cache in keys_of)
            wanted = attention(
                self.q[request], keys, values, scale=o["scale"], causal=o["causal"],
                window=o["window"], softcap=o["softcap"], slopes=slopes,
            )  # fmt: skip
            assert_matches((result[0][request], result[1][request].T), wanted)

    def content(self) -> list[torch.Tensor]:
        """The caches of the requests, `[B, capacity, Hkv, D]`."""
        if self.table is None:
            return [cache[self.index] for cache in self.caches]
        return [pool[self.table.long()].flatten(1, 2) for pool in self.paged or ()]

    def expected_content(self) -> list[torch.Tensor]:
        """The same with the new keys and values; call it before the function."""
        found = [cache.clone() for cache in self.content()]
        for cache, new in zip(found, self.new, strict=True):
            for request, length in enumerate(self.lens):
                if new is not None:
                    cache[request, length : length + new.shape[1]] = new[request]
        return found

    @staticmethod
    def _ints(values: list[int] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


VARIANTS: dict[str, list[Any]] = {
    "queries": [1, 1, 3, 11],
    "new": [0, 1, 3, 5],
    "page": [0, 0, 4, 16],
    "leftpad": [False, False, True],
    "index": [False, False, True],
    "causal": [True, True, False],
    "window": [(-1, -1), (-1, -1), (5, 0), (7, 3), (-1, 2), (0, -1), (100, 100)],
    "softcap": [0.0, 0.0, 3.0],
    "scale": [None, 0.3],
    "slopes": [None, None, "heads", "requests"],
}


def _case(seed: int, **fixed: Any) -> Case:
    drawn = Case(seed, **fixed).options
    if drawn["page"]:
        fixed |= {"leftpad": False, "index": False}
    return Case(seed, **fixed)


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        *((seed, "torch") for seed in range(40)),
        *((seed, "triton") for seed in range(6)),
        *(pytest.param(seed, "triton", marks=pytest.mark.slow) for seed in range(6, 24)),
    ],
)
def test_matches_float64(seed: int, name: str) -> None:
    """M1-M5, P3, P7: output, LSE and the written cache; other elements of the cache keep their
    bits."""
    with attnlib.use_backend(name):
        _check_seed(seed)


def _check_seed(seed: int) -> None:
    case = _case(seed)
    wanted = case.expected_content()
    result = case.call()
    for written, expected in zip(case.content(), wanted, strict=True):
        assert torch.equal(written, expected)
    case.check(result)


@pytest.mark.parametrize(
    ("page", "new", "name"),
    [
        *((page, new, "torch") for page in (0, 16) for new in (0, 2)),
        (16, 2, "triton"),
        *(pytest.param(page, new, "triton", marks=pytest.mark.slow)
          for page, new in ((0, 0), (0, 2), (16, 0))),
    ],
)  # fmt: skip
def test_values_that_change_in_place_are_read_again(page: int, new: int, name: str) -> None:
    """Lengths and tables change without a trace that torch keeps (through numpy, as a kernel or a
    graph would); the prepared call is the same one."""
    with attnlib.use_backend(name):
        _check_changes(page, new, name)


def _check_changes(page: int, new: int, backend: str) -> None:
    case = Case(
        3, page=page, new=new, leftpad=False, index=False, slopes=None, queries=2, scale=None
    )
    lens = Case._ints(case.lens)
    case.check(case.call(cache_seqlens=lens))
    assert lens is not None
    number = len(STATE.calls)
    for step in range(4):
        torch.manual_seed(step)
        case.lens = [int(x) for x in torch.randint(1, case.capacity - new, (3,))]
        _write_unseen(lens, torch.tensor(case.lens, dtype=torch.int32))
        if case.table is not None:
            order = torch.randperm(case.paged[0].shape[0])[: case.table.numel()].int()
            _write_unseen(case.table, order.view_as(case.table))
        case.q.normal_()
        wanted = case.expected_content()
        result = case.call(cache_seqlens=lens)
        for written, expected in zip(case.content(), wanted, strict=True):
            assert torch.equal(written, expected)
        case.check(result)
    assert len(STATE.calls) == number
    if backend == "triton":
        assert STATE.recent is not None  # the quick comparison accepted the calls


def _write_unseen(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values without a change of the tensor's version."""
    version = tensor._version
    if tensor.is_cuda:
        tensor.data.copy_(values)
    else:
        tensor.numpy()[...] = values.numpy()
    assert tensor._version == version


def test_a_tensor_in_the_memory_of_a_freed_one(backend: str) -> None:
    """A call with new lengths at any address is not mistaken for the call before."""
    case = Case(5, page=16, new=0, leftpad=False, index=False, slopes=None, queries=1)
    for step in range(6):
        case.lens = [1 + step, 17 + step, 40 - step]
        case.check(case.call())  # the lengths are a new tensor in every call


def test_every_argument_is_part_of_the_prepared_call(backend: str) -> None:
    """After a call, a call that differs in one argument only is not served by the first one."""
    case = Case(7, page=16, new=0, leftpad=False, index=False, slopes=None, queries=2,
                causal=True, window=(-1, -1), softcap=0.0, scale=None)  # fmt: skip
    lens = Case._ints(case.lens)
    for name, value in (("causal", False), ("window", (3, 0)), ("softcap", 2.0), ("scale", 0.7)):
        for _ in range(2):
            case.check(case.call(cache_seqlens=lens))
        before, case.options[name] = case.options[name], value
        case.check(case.call(cache_seqlens=lens))
        case.options[name] = before
    case.check(case.call(cache_seqlens=lens))
    alone = case.call(cache_seqlens=lens, return_softmax_lse=False)
    assert torch.equal(alone, case.call(cache_seqlens=lens)[0])
    case.slopes = torch.rand(4, device=DEVICE)
    case.check(case.call(cache_seqlens=lens))
    case.q = torch.randn(3, 4, 4, 16, device=DEVICE).transpose(1, 2)[:, :2]
    case.slopes = None
    case.check(case.call(cache_seqlens=lens))


def test_a_scale_that_changes_in_place_is_read_again(backend: str) -> None:
    q, k, v = torch.randn(1, 1, 2, 16), *torch.randn(2, 1, 8, 2, 16)
    lengths = torch.tensor([8], dtype=torch.int32)
    for name, other in (("softmax_scale", 0.0), ("softcap", 0.1)):
        given = {"softmax_scale": 3.0, "cache_seqlens": lengths, name: torch.tensor(1.0)}
        flash_attn_with_kvcache(q, k, v, **given)
        given[name].fill_(other)
        found = flash_attn_with_kvcache(q, k, v, **given)
        given[name] = other
        torch.testing.assert_close(found, flash_attn_with_kvcache(q, k, v, **given))


def test_lengths_as_an_int_or_none(backend: str) -> None:
    case = Case(1, page=0, new=1, leftpad=False, index=False, slopes=None, queries=1)
    for length in (5, 9, 9, 20):
        case.lens = [length] * 3
        case.check(case.call(cache_seqlens=length))
    case = Case(1, page=0, new=0, leftpad=False, index=False, slopes=None, queries=2)
    case.lens = [case.capacity] * 3
    case.check(case.call(cache_seqlens=None))


def test_caches_of_any_strides(backend: str) -> None:
    """P1, P9: [B, H, S, D] memory, a part of a longer cache, interleaved keys and values."""
    for build in (
        lambda: torch.randn(3, 2, 48, 16, device=DEVICE).transpose(1, 2),
        lambda: torch.randn(3, 64, 2, 16, device=DEVICE)[:, :48],
        lambda: torch.randn(3, 48, 2, 2, 16, device=DEVICE)[:, :, 1],
        lambda: torch.randn(3, 48, 2, 40, device=DEVICE)[..., 8:24],
        lambda: torch.randn(3, 49, 2, 16, device=DEVICE)[:, :47],
    ):
        for new in (0, 2):
            case = Case(2, page=0, new=new, leftpad=new > 0, index=False, slopes=None, queries=2)
            case.caches = [build(), build()[..., :8]]
            case.lens = [min(length, 40) for length in case.lens]
            case.leftpad = case.leftpad and [min(pad, 3) for pad in case.leftpad]
            wanted = case.expected_content()
            result = case.call()
            for written, expected in zip(case.content(), wanted, strict=True):
                assert torch.equal(written, expected)
            case.check(result)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (3, 2)), (False, (-1, -1))]
)
def test_rotary_embedding(
    interleaved: bool, causal: bool, window: tuple[int, int], backend: str
) -> None:
    """Keys at cache_seqlens, cache_seqlens + 1, ...; queries likewise if causal or local, else all
    at cache_seqlens. The elements past rotary_dim do not rotate."""
    case = Case(4, page=16, new=2, leftpad=False, index=False, slopes=None, queries=2,
                causal=causal, window=window)  # fmt: skip
    angles = torch.rand(64, 6, device=DEVICE).double() * 6
    q, new = case.q.clone(), case.new[0]
    assert new is not None
    rotated = torch.empty_like(new)
    for request, length in enumerate(case.lens):
        for token in range(2):
            position = length + (token if causal or window != (-1, -1) else 0)
            case.q[request, token] = _rotated(q[request, token], angles[position], interleaved)
            rotated[request, token] = _rotated(
                new[request, token], angles[length + token], interleaved
            )
    turned_q, case.q = case.q, q
    kept, case.new[0] = case.new[0], rotated
    wanted = case.expected_content()
    case.new[0] = kept
    for _ in range(2):
        result = case.call(
            rotary_cos=angles.cos().float(), rotary_sin=angles.sin().float(),
            rotary_interleaved=interleaved,
        )  # fmt: skip
    torch.testing.assert_close(case.content()[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(case.content()[1], wanted[1])
    case.q = turned_q
    case.check(result)


def _rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`[H, D]` as complex numbers, turned."""
    count = angles.shape[0]
    head, rest = x[:, : 2 * count].double(), x[:, 2 * count :]
    if interleaved:
        pairs = torch.complex(head[:, 0::2], head[:, 1::2])
    else:
        pairs = torch.complex(head[:, :count], head[:, count:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    parts = (turned.real, turned.imag)
    head = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((head.float(), rest), -1)


def test_packed_queries_and_the_names_of_flash_attention_3(backend: str) -> None:
    case = Case(8, page=16, new=0, leftpad=False, index=False, slopes=None, queries=4,
                causal=True, window=(-1, -1), softcap=0.0, scale=None)  # fmt: skip
    starts = torch.tensor([0, 3, 4, 9], dtype=torch.int32, device=DEVICE)
    q = torch.randn(9, 4, 16, device=DEVICE)
    for _ in range(2):
        out, lse = flash_attn_with_kvcache(
            q, *(case.paged or ()), cache_seqlens=Case._ints(case.lens), page_table=case.table,
            cu_seqlens_q=starts, max_seqlen_q=8, causal=True, return_softmax_lse=True,
            attention_chunk=8,
        )  # fmt: skip
        keys_of = case.content()
        for request, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
            keys, values = (x[request, : case.lens[request]] for x in keys_of)
            wanted = attention(q[first:end], keys, values, causal=True, chunk=8)
            assert_matches((out[first:end], lse.T[first:end]), wanted)
        starts.copy_(torch.tensor([0, 1, 7, 9]))
        case.lens = [11, 20, 48]


def test_arguments_that_do_not_fit(backend: str) -> None:
    """The message names the argument; the cache keeps its bits."""
    case = Case(0, page=16, new=1, leftpad=False, index=False, slopes=None, queries=1)
    before = [cache.clone() for cache in case.paged or ()]
    ints = Case._ints
    for changes, message in (
        ({"cache_seqlens": ints([1, 2])}, "cache_seqlens has shape"),
        ({"cache_seqlens": torch.tensor([1, 2, 3], device=DEVICE)}, "cache_seqlens is torch.int64"),
        ({"cache_seqlens": None}, "k and v without cache_seqlens"),
        ({"cache_seqlens": -1}, "cache_seqlens=-1 must be"),
        ({"cache_leftpad": ints([0, 0, 0])}, "cache_leftpad with a block_table"),
        ({"block_table": case.table.long()}, "block_table is torch.int64"),
        ({"block_table": case.table[:2]}, "block_table has shape"),
        ({"page_table": case.table}, "one argument"),
        ({"window_size": (1, 2, 3)}, "window_size="),
        ({"alibi_slopes": torch.rand(5, device=DEVICE)}, "alibi_slopes has shape"),
        ({"alibi_slopes": torch.rand(4, device=DEVICE).half()}, "alibi_slopes is torch.float16"),
        ({"rotary_cos": torch.rand(64, 2, device=DEVICE)}, "rotary_sin is None"),
        ({"rotary_cos": torch.rand(47, 2, device=DEVICE)}, "has 47 positions.*holds 48 tokens"),
        ({"q": None}, "None is given for q, k, v or block_table"),
        ({"block_table": [[0]]}, "is given for q, k, v or block_table"),
        ({"k_cache": [1]}, "k_cache is a list; it must be a tensor"),
        ({"cache_seqlens": 10**12}, "cache_seqlens=1000000000000 must be"),
        ({"softmax_scale": "x"}, "softmax_scale='x' must be a number"),
        ({"softcap": None}, "softcap=None must be a number"),
        ({"window_size": None}, "window_size=None must be a pair"),
        ({"v_cache": case.paged[0], "v": case.new[0]}, "k_cache and v_cache share memory"),
        (
            {"v_cache": case.paged[1][:1].expand(case.paged[1].shape)},
            "v_cache has strides.*tokens share memory",
        ),
    ):
        with pytest.raises(FlashAttentionArgumentError, match=message):
            case.call(**changes)
    if DEVICE == "cpu":
        for lens in ([48, 1, 1], [0, 1, 2**30]):
            with pytest.raises(RuntimeError, match="block_table or the cache holds 0 to 48"):
                case.call(cache_seqlens=ints(lens))
    for after, cache in zip(before, case.paged or (), strict=True):
        assert torch.equal(after, cache)


def test_arguments_that_are_refused_with_a_reason() -> None:
    case = Case(0, page=16, new=0, leftpad=False, index=False, slopes=None, queries=1)
    some = torch.ones(1, device=DEVICE)
    for name in ("qv", "q_descale", "k_descale", "v_descale", "cu_seqlens_k_new", "rotary_seqlens"):
        with pytest.raises(UnsupportedConfigError, match=f"{name}=a tensor: ") as raised:
            case.call(**{name: some})
        assert raised.value.reasons == (name,)
    case.q.requires_grad_()
    with torch.enable_grad(), pytest.raises(UnsupportedConfigError, match="forward pass only"):
        case.call()


def test_the_cache_is_not_kept_alive() -> None:
    """A prepared call holds lengths and tables, but no keys."""
    import gc
    import weakref

    case = Case(9, page=16, new=1, leftpad=False, index=False, slopes=None, queries=1)
    lens = Case._ints(case.lens)
    with attnlib.use_backend("triton"):
        for _ in range(3):
            case.call(cache_seqlens=lens)
    assert STATE.recent is not None and case.paged is not None
    watched = [weakref.ref(cache.untyped_storage()) for cache in case.paged]
    pointers = [cache.data_ptr() for cache in case.paged]
    tensors = [weakref.ref(cache) for cache in case.paged]
    case.paged = None
    gc.collect()
    assert all(found() is None for found in (*watched, *tensors))
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    assert not any(x.data_ptr() in pointers and x.dim() == 4 for x in alive)


def test_threads_share_no_buffer() -> None:
    """Calls of two threads at the same time give the results of their own lengths."""
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> None:
        backend = "torch" if DEVICE == "cpu" else "triton"  # the interpreter has one thread
        with torch.no_grad(), attnlib.use_backend(backend):
            case = Case(seed, page=16, new=1, leftpad=False, index=False, slopes=None, queries=1)
            for _ in range(5):
                case.check(case.call())

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, seed) for seed in (11, 12)]:
            future.result()


@pytest.mark.parametrize("way", ["use_backend", "environment"])
def test_a_call_follows_the_backend_that_is_requested_now(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared calls are kept by what selects their backend, the environment included."""
    STATE.__init__()  # type: ignore[misc]  # drops the calls of this thread
    q = torch.randn(1, 1, 4, 16, device=DEVICE)
    caches = [torch.randn(1, 16, 2, 16, device=DEVICE) for _ in range(2)]
    lens = torch.tensor([16], dtype=torch.int32, device=DEVICE)
    for count, name in enumerate(("torch", "torch", "triton", "triton", "torch")):
        if way == "environment":
            monkeypatch.setenv("ATTNLIB_BACKEND", name)
            flash_attn_with_kvcache(q, *caches, cache_seqlens=lens)
        else:
            with attnlib.use_backend(name):
                flash_attn_with_kvcache(q, *caches, cache_seqlens=lens)
        names = [layer.backend.get_name() for layer in STATE.layers.values()]
        assert sorted(names) == (["torch"] if count < 2 else ["torch", "triton"])


@pytest.mark.skipif(DEVICE != "cpu", reason="values on a GPU are checked under ATTNLIB_VALIDATE")
@pytest.mark.parametrize("new", [0, 1])
def test_values_that_change_in_place_are_checked_in_every_call(new: int) -> None:
    """The quick path of equal calls reads lengths and tables as the first call does."""
    q = torch.randn(1, 1, 4, 16)
    caches = [torch.randn(4, 4, 2, 16) for _ in range(2)]
    keys = [torch.randn(1, 1, 2, 16) for _ in range(2)] if new else [None, None]
    lens, table = torch.tensor([5], dtype=torch.int32), torch.tensor([[3, 1]], dtype=torch.int32)
    call = lambda: flash_attn_with_kvcache(  # noqa: E731  # short
        q, *caches, *keys, cache_seqlens=lens, block_table=table
    )
    with attnlib.use_backend("torch"):
        for _ in range(3):
            call()
        before = [cache.clone() for cache in caches]
        for tensor, place, value in ((table, (0, 1), 4), (table, (0, 0), -1), (lens, 0, -1),
                                     (lens, 0, 9)):  # fmt: skip
            old = int(tensor[place])
            tensor[place] = value
            with pytest.raises(FlashAttentionArgumentError):
                call()
            tensor[place] = old
        assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))
        call()


@pytest.mark.parametrize(
    "options", [{"window_size": (2.5, 0)}, {"window_size": ("2", 0)}, {"attention_chunk": 1.5}]
)
def test_windows_and_chunks_are_integers(options: dict[str, Any]) -> None:
    """Fractions would be truncated."""
    q, cache = torch.randn(1, 1, 4, 16, device=DEVICE), torch.randn(1, 8, 2, 16, device=DEVICE)
    with pytest.raises(FlashAttentionArgumentError, match="must be an integer"):
        flash_attn_with_kvcache(q, cache, cache, causal=True, **options)


@pytest.mark.skipif(DEVICE != "cpu", reason="synchronizes")
def test_validation_follows_the_variable(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for calls like the one before, which take a quick path."""
    q = torch.randn(2, 1, 4, 16)
    keys, values = torch.randn(4, 256, 2, 16), torch.randn(4, 256, 2, 16)
    lens = torch.tensor([20, 30], dtype=torch.int32)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    arguments = {"cache_seqlens": lens, "block_table": table, "causal": True}
    for _ in range(3):
        flash_attn_with_kvcache(q, keys, values, **arguments)
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    flash_attn_with_kvcache(q, keys, values, **arguments)
    table[1, 0] = 9
    with pytest.raises(ContractError, match="block_table"):
        flash_attn_with_kvcache(q, keys, values, **arguments)
    table[1, 0] = 2
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    flash_attn_with_kvcache(q, keys, values, **arguments)


def test_tangents_are_refused(backend: str) -> None:
    """Also in a call like the one before; kernels would lose them."""
    case = Case(9, page=16, new=1, leftpad=False, index=False, slopes=None, queries=1)
    lens = Case._ints(case.lens)
    with forward_ad.dual_level():
        for _ in range(3):
            case.call(cache_seqlens=lens)
        assert backend != "triton" or STATE.recent is not None
        case.q = forward_ad.make_dual(case.q, torch.ones_like(case.q))
        with pytest.raises(UnsupportedConfigError, match="a tangent of forward-mode gradients"):
            case.call(cache_seqlens=lens)
